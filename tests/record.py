"""What the compiled kernels of `make test` answered when they were last compiled: `tests/compiled/<target>.json`.

Compiling them takes minutes, and the same sources give the same code. So the record has, of each kernel, a digest of
all that decides its code, and the answers to what tests ask of that code. A run compiles only the kernels whose digest
is not recorded. The others answer from the record, and the tests judge these answers as they judge fresh ones.

- `make compiled` compiles all of them and writes the record anew.
- `make test-all` compiles all of them, too, and fails where an answer is not the recorded one.
- The digest holds the version of triton, too: with another triton nothing is recorded, and all is compiled.
- To make a digest takes a tenth of a second. So `<target>.sources.json` has digests by keys, which name all that the
  front end would make the kernel from. Only a kernel whose key is not there is made.
- Where a check in `tests/assembly.py` changes, its old answers say nothing: all is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import hashlib
from importlib.metadata import version
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("compiled")
CHECKS = Path(__file__).with_name("assembly.py")
WRITING = "IRIS_TEST_WRITE_COMPILED" in os.environ


def digest(*parts: str) -> str:
    """Of triton's version and whatever else decides the code of a kernel."""
    return hashlib.sha256("\n".join([version("triton"), *parts]).encode()).hexdigest()[:20]


def checks() -> str:
    """A digest of the checks, whose answers are recorded by their names."""
    return hashlib.sha256(CHECKS.read_bytes()).hexdigest()[:20]


@dataclass(frozen=True)
class Known:
    """What is known of a kernel's code: its digest, the shared memory that it takes, and its answers by question."""

    digest: str
    shared: int
    answers: dict[str, Any] = field(default_factory=dict)


def path_of(target: str) -> Path:
    return FOLDER / f"{target}.json"


def is_of_this_triton(target: str) -> bool:
    path = path_of(target)
    return path.exists() and json.loads(path.read_text())["triton"] == version("triton")


def read(target: str) -> dict[str, Known]:
    """The recorded kernels by name; none where triton or the checks are others now."""
    if not is_of_this_triton(target):
        return {}
    kept = json.loads(path_of(target).read_text())
    return {name: Known(**each) for name, each in kept["kernels"].items()} if kept["checks"] == checks() else {}


def sources_of(target: str) -> Path:
    return FOLDER / f"{target}.sources.json"


def read_sources(target: str) -> dict[str, str]:
    """Digests by keys of kernels' sources (`compile_kernels.key_of`): of a source that is not there it is made."""
    path = sources_of(target)
    if WRITING or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return kept["digests"] if kept["triton"] == version("triton") else {}


def write_sources(target: str, digests: dict[str, str]) -> None:
    kept = {"triton": version("triton"), "digests": digests}
    sources_of(target).write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def write(target: str, kernels: dict[str, Known]) -> None:
    """An answer a line, sorted, so that a difference shows which code has changed in what."""
    FOLDER.mkdir(exist_ok=True)
    kept = {"triton": version("triton"), "checks": checks(), "kernels": {n: vars(k) for n, k in kernels.items()}}
    path_of(target).write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def answered(answers: dict[str, Any], question: str, work: Callable[[], Any], trusted: bool) -> Any:
    """The recorded answer if there is one and it is `trusted`; else that of `work`, which must be the recorded one."""
    if trusted and question in answers:
        return answers[question]
    answer = json.loads(json.dumps(work()))
    if question in answers and not WRITING:
        assert answer == answers[question], f"{question}: {answer}, recorded is {answers[question]}: make compiled"
    return answer
