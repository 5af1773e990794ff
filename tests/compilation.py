"""Compiled kernels for tests, and what is recorded of them in `tests/compiled/<target>.json`.

`tests/compile_kernels.py` compiles in processes of its own, a target once, from the first test on. Compiling takes
minutes, so the record keeps the answers to what tests ask of each kernel's code, by the kernel's key. A run compiles
only kernels whose keys are not recorded; all others answer from the record, and tests judge these like fresh ones.
`make compiled` writes the record anew. `make test-all` compiles everything and compares the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
import fcntl
import hashlib
from importlib.metadata import version
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from tests.assembly import UNTRACED, Kernel, Kernels
from tests.bare import bare
from tests.processes import ROOT, patient, python_path
from tests.untraced import copy_untraced

RECORDS = Path(__file__).with_name("compiled")
WRITING = "IRIS_TEST_WRITE_COMPILED" in os.environ
ENV_KERNELS = "IRIS_TEST_KERNELS"  # a regular expression: which kernels are compiled, all of them anew
_LIMIT_S = 1500.0


def checks() -> str:
    """A digest of the checks, whose answers are recorded by their names."""
    return hashlib.sha256(bare((ROOT / "tests" / "assembly.py").read_text()).encode()).hexdigest()[:20]


def recorded(target: str) -> dict[str, dict[str, Any]]:
    """What is recorded of each kernel: `key`, `shared` (bytes) and `answers`; nothing once a check has changed."""
    path = RECORDS / f"{target}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    return kept["kernels"] if kept.get("checks") == checks() and kept["triton"] == version("triton") else {}


class CompiledKernel(Kernel):
    """A kernel that answers from the record, if there is an answer and its code was not compiled in this run."""

    def __init__(self, name: str, key: str, text: str | None, shared: int, answers: dict[str, Any]) -> None:
        super().__init__(name, text or "", shared)
        self.key, self.compiled, self.answers = key, text is not None, answers
        self.asked: dict[str, Any] = {}
        self.compile: Callable[[], str] = lambda: ""

    @property
    def text(self) -> str:
        if not self.compiled:
            self._text, self.compiled = self.compile(), True
        return self._text

    def ask(self, question: str, work: Callable[[Kernel], Any]) -> Any:
        known, answer = question in self.answers, self.answers.get(question)
        if not known or self.compiled:
            fresh = json.loads(json.dumps(work(self)))
            assert not known or fresh == answer or WRITING, f"{question}: {fresh}, recorded is {answer}: make compiled"
            answer = fresh
        self.asked[question] = answer
        return answer


class Compilation:
    """Of a target's name, its kernels by name; those of `UNTRACED` are without any call that records events.

    Test processes that share `folder` compile for a target once. `whole`: kernels that are recorded are compiled, too.
    """

    def __init__(self, folder: Path, whole: bool) -> None:
        self.whole = whole
        self._pattern = os.environ.get(ENV_KERNELS, "")
        self._anew = whole or WRITING or bool(self._pattern)
        self._folder, self._processes = folder, list[subprocess.Popen]()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._found: dict[str, Future[Kernels]] = {}

    def start(self, target: str) -> None:
        """Begins to compile for a target."""
        if target not in self._found:
            self._found[target] = self._pool.submit(self._compiled, target)

    def __call__(self, target: str) -> Kernels:
        self.start(target)
        return self._found[target].result()

    def _compiled(self, target: str) -> Kernels:
        known, kernels, folder = recorded(target), Kernels(), self._folder / target.replace(" ", "_")
        keys = [] if self._anew else [each["key"] for each in known.values()]
        self._compile(target, folder, self._pattern, keys)
        for path in sorted(folder.glob("*.key")):
            name, key, text = path.stem, path.read_text(), _text(path)
            kept = known.get(name, {})
            kept = kept if kept.get("key") == key else {"shared": 0, "answers": {}}
            shared = kept["shared"] if text is None else int(path.with_suffix(".shared").read_text())
            kernels[name] = kernel = CompiledKernel(name, key, text, shared, kept["answers"])
            kernel.compile = lambda path=path: self._alone(target, path)
        return kernels

    def _alone(self, target: str, path: Path) -> str:
        """The text of a kernel that is asked what the record does not say."""
        folder = path.with_suffix("")
        self._compile(target, folder, f"^{path.stem}$", [])
        return _text(folder / path.name)

    def _compile(self, target: str, folder: Path, pattern: str, keys: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with its process
            if not (folder / "complete").exists():
                (folder / "keys").write_text("\n".join(keys))
                self._run(target, folder, [str(folder), pattern, str(folder / "keys")], processes=1 if keys else 2)
                (folder / "complete").touch()

    def _run(self, target: str, folder: Path, arguments: list[str], processes: int) -> None:
        name, source = target, ROOT
        if target == UNTRACED:
            name, source = "sm_90", folder / "source"
            copy_untraced(source)
        command = [sys.executable, "-m", "tests.compile_kernels", name, *arguments]
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
        for begun in folder.glob("*.begun"):  # by processes that were ended
            begun.unlink()
        with (folder / "errors").open("w") as errors:
            for _ in range(processes):
                self._processes.append(
                    subprocess.Popen(command, cwd=source, env=environment, stdout=errors, stderr=subprocess.STDOUT)
                )
            wrong = [process.wait(patient(_LIMIT_S)) for process in self._processes[-processes:]]
        assert not any(wrong), f"{target}: {(folder / 'errors').read_text()[-4000:]}"

    def write(self) -> None:
        """The record anew: an answer a line, sorted, so that a difference shows which code has changed in what."""
        RECORDS.mkdir(exist_ok=True)
        for target, found in self._found.items():
            kernels = {n: dict(key=k.key, shared=k.shared, answers=k.asked) for n, k in found.result().items()}
            kept = {"triton": version("triton"), "checks": checks(), "kernels": kernels}
            (RECORDS / f"{target}.json").write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")

    def close(self) -> None:
        """Ends what nobody waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()


def _text(path: Path) -> str | None:
    """The assembly beside a kernel's key, if the kernel was compiled."""
    paths = (path.with_suffix(kind) for kind in (".ptx", ".amdgcn"))
    return next((each.read_text() for each in paths if each.exists()), None)
