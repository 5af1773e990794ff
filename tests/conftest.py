"""Which tests run where: `gpu` ones under torchrun and only those, the rest without it; and what a session shares."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
import os

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
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], assembly.Kernels]]:
    """Of a target's name, its kernels by name. The first call starts the compilation of all targets, side by side."""
    known: dict[str, Future[assembly.Kernels]] = {}
    pool = ThreadPoolExecutor(os.cpu_count())

    def kernels(target: str) -> assembly.Kernels:
        for name in (target, *assembly.CUDA, *assembly.HIP, assembly.UNTRACED):
            if name not in known:
                known[name] = pool.submit(assembly.compile_all, name, tmp_path_factory.mktemp("compiled"))
        return known[target].result()

    yield kernels
    pool.shutdown(cancel_futures=True)
