"""Which tests run where, and what they share.

`gpu` ones run under torchrun and only those, the rest without it. `make test` and `make test-gpu` leave out what is
marked `slow`, `make test-all` and `make test-gpu-all` nothing. These are marked here:

- of a test marked `some(n)` all but n cases, spread evenly. Under torchrun `some(n, on_gpus=m)` keeps m, for each case
  may compile kernels of its own there; `some(on_gpus=m)` counts there only.
- Without torchrun: four ranks, unless the test has no fewer or is marked `four`; a single rank, but for the first of a
  test's cases; two or three ranks, in turns, of a case that has both; kernels for a vendor's second architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
import fcntl
import gc
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING
import zlib

import pytest

from tests import assembly

if TYPE_CHECKING:
    from tests import compilation

os.environ.setdefault("IRIS_RATES", "data-sheet")  # plans are those of any machine of the kind
os.environ.setdefault("IRIS_REPLAY", "tests")  # in the interpreter, all kernels run several times as fast
_UNDER_TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
_SECOND_TARGETS = assembly.CUDA[1:] + assembly.HIP[1:]


def pytest_configure(config: pytest.Config) -> None:
    """Imports iris before any test imports triton; not where other processes run the tests."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    from tests import harness

    if harness.ON_GPU:
        from tests import compile_once

        compile_once.prepare()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    reason = "runs without torchrun" if _UNDER_TORCHRUN else "needs GPUs: torchrun -m pytest -m gpu"
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != _UNDER_TORCHRUN:
            item.add_marker(pytest.mark.skip(reason=reason))
    if not _UNDER_TORCHRUN:
        _mark_worlds_and_targets(items)
        _mark_two_or_three(items)
    _mark_all_but_some(items)
    yield  # `-m` takes what it wants
    items.sort(key=_turn)
    if "IRIS_TEST_SHARE" in os.environ:  # "2/4": of four shares the second; see on_gpus.py
        share, cut = map(int, os.environ["IRIS_TEST_SHARE"].split("/"))
        items[:] = items[share - 1 :: cut]


def _mark_worlds_and_targets(items: list[pytest.Item]) -> None:
    sizes: dict[object, set[int]] = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        size, smaller = given.get("world_size"), sizes.setdefault(getattr(item, "function", None), set())
        if (size == 1 and 1 in smaller) or (size == 4 and smaller - {4} and item.get_closest_marker("four") is None):
            item.add_marker(pytest.mark.slow)
        smaller.add(size)
        if given.get("target") in _SECOND_TARGETS:
            item.add_marker(pytest.mark.slow)


def _mark_two_or_three(items: list[pytest.Item]) -> None:
    """Leave each case two or three ranks, in turns along a file; the order of a test's cases is arbitrary but fixed."""
    files: dict[Path, dict[tuple, dict[int, pytest.Item]]] = {}
    for item in items:
        size = item.callspec.params.get("world_size") if hasattr(item, "callspec") else None
        if size in (2, 3) and str(size) in item.callspec.id.split("-") and item.get_closest_marker("slow") is None:
            others = item.callspec.id.split("-")
            others.remove(str(size))
            case = item.function, zlib.crc32(repr(others).encode()), repr(others)
            files.setdefault(item.path, {}).setdefault(case, {})[size] = item
    for cases in files.values():
        order = {function: place for place, (function, *_) in enumerate(cases)}
        both = sorted((order[test], *rest, test) for (test, *rest), sizes in cases.items() if len(sizes) == 2)
        for turn, (_, code, others, test) in enumerate(both):
            cases[test, code, others][3 - turn % 2].add_marker(pytest.mark.slow)


def _turn(item: pytest.Item) -> int:
    """The first are tests that keep one core busy for long; the last wait for kernels, which are compiled meanwhile."""
    return -1 if item.path.name == "test_types.py" else "compiled" in item.fixturenames


def _mark_all_but_some(items: list[pytest.Item]) -> None:
    for cases in _cases_of(items):
        mark = cases[0].get_closest_marker("some")
        expected = _expected(len(cases), *mark.args, **mark.kwargs)
        kept = {index * len(cases) // expected for index in range(expected)}
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def _expected(cases: int, n: int | None = None, on_gpus: int | None = None) -> int:
    """How many of the cases `some(n, on_gpus=...)` keeps."""
    kept = n if on_gpus is None or not _UNDER_TORCHRUN else on_gpus
    return cases if kept is None else kept


def _cases_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test that is marked `some`, without those that are slow anyway."""
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") is not None and item.get_closest_marker("slow") is None:
            groups.setdefault(item.function, []).append(item)
    return list(groups.values())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write at once why a test failed under torchrun: a rank that is ended before its last test shows no failures."""
    if _UNDER_TORCHRUN and report.failed:
        reasons = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nFAILED {report.nodeid}", *reasons[:6], sep="\n", file=sys.stderr, flush=True)


def pytest_collection_finish() -> None:
    """What is imported now stays, and is not looked through for garbage again and again, a tenth of all time."""
    from tests import processes

    gc.collect()
    gc.freeze()
    processes.save_time()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is left at the end would be called a leak


@pytest.fixture(scope="session", autouse=True)
def _our_turn() -> None:
    """Wait, after all imports, for tests that must not run in parallel with these (on_gpus.py)."""
    if "IRIS_TEST_TURN" in os.environ:
        with open(os.environ["IRIS_TEST_TURN"]) as turn:
            fcntl.flock(turn, fcntl.LOCK_SH)


@pytest.fixture(scope="session", autouse=True)
def _workers_end():
    yield
    sys.modules["tests.harness"].close_pools()


@pytest.fixture(scope="session")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[compilation.Compilation]:
    """Of a target's name, its kernels by name: in rare forms too where slow tests look at them."""
    from tests import compilation

    folder = tmp_path_factory.getbasetemp()
    in_parallel = "PYTEST_XDIST_WORKER" in os.environ  # whose folders stand in one
    whole = any("compiled" in item.fixturenames and item.get_closest_marker("slow") for item in request.session.items)
    kernels = compilation.Compilation((folder.parent if in_parallel else folder) / "compiled", whole)
    yield kernels
    if compilation.WRITING and not request.session.testsfailed:
        kernels.write()
    kernels.close()


@pytest.fixture(scope="session", autouse=True)
def _compile_meanwhile(request: pytest.FixtureRequest) -> None:
    """What the tests to come want compiled is, from the first test on."""
    if _UNDER_TORCHRUN:
        return
    wanting = [item for item in request.session.items if "compiled" in item.fixturenames]
    for target in dict.fromkeys(
        item.callspec.params.get("target", "sm_90") if hasattr(item, "callspec") else "sm_90" for item in wanting
    ):
        request.getfixturevalue("compiled").start(target)
