"""Which tests run where: `gpu` ones under torchrun and only those, the rest without it; and what a session shares."""

from collections.abc import Callable

import pytest

from tests import assembly, harness


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "runs without torchrun" if harness.UNDER_TORCHRUN else "needs GPUs: torchrun -m pytest -m gpu"
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != harness.UNDER_TORCHRUN:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _workers_end():
    yield
    harness.close_pools()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], assembly.Kernels]:
    """Of a target's name, its kernels by name; each target is compiled once."""
    known: dict[str, assembly.Kernels] = {}

    def kernels(target: str) -> assembly.Kernels:
        if target not in known:
            known[target] = assembly.compile_all(target, tmp_path_factory.mktemp(target))
        return known[target]

    return kernels
