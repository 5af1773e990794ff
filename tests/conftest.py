"""Which tests run where: `gpu` ones under torchrun and only those, the rest without it."""

import pytest

from tests import harness


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "runs without torchrun" if harness.UNDER_TORCHRUN else "needs GPUs: torchrun -m pytest -m gpu"
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != harness.UNDER_TORCHRUN:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _workers_end():
    yield
    harness.close_pools()
