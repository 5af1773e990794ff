"""Which tests run where: `gpu` ones under torchrun and only those, the rest without it; and what they share."""

from collections.abc import Callable, Iterator
import os

import pytest

from tests import assembly, harness


@pytest.hookimpl(trylast=True)  # so that shares are cut of what `-m` has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "runs without torchrun" if harness.UNDER_TORCHRUN else "needs GPUs: torchrun -m pytest -m gpu"
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != harness.UNDER_TORCHRUN:
            item.add_marker(pytest.mark.skip(reason=reason))
    if "IRIS_TEST_SHARE" in os.environ:  # "2/4": of four shares the second; see on_gpus.py
        share, cut = map(int, os.environ["IRIS_TEST_SHARE"].split("/"))
        items[:] = items[share - 1 :: cut]


@pytest.fixture(scope="session", autouse=True)
def _workers_end():
    yield
    harness.close_pools()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], assembly.Kernels]]:
    """Of a target's name, its kernels by name."""
    compilation = assembly.Compilation(tmp_path_factory.mktemp)
    yield compilation
    compilation.close()


@pytest.fixture(scope="session", autouse=True)
def _compile_meanwhile(request: pytest.FixtureRequest) -> None:
    """Where any of the tests to come wants kernels compiled, all are, from the first test on."""
    if not harness.UNDER_TORCHRUN and any("compiled" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("compiled")
