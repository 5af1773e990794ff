"""Compile kernels for tests, and keep the answers of checks in `tests/compiled/<target>.json`.

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

from tests.assembly import Kernel, Kernels
from tests.bare import bare
from tests.processes import ROOT, patient, python_path

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
    """A kernel that answers from the record, unless its code was compiled in this run."""

    def __init__(self, path: Path, kept: dict[str, Any]) -> None:
        text = next((each.read_text() for each in path.parent.glob(f"{path.stem}.[pa]*")), None)
        self.key, self.compiled, self.collected = path.read_text(), text is not None, dict[str, Any]()
        self.answers = kept.get("answers", {}) if kept.get("key") == self.key else {}
        shared = int(path.with_suffix(".shared").read_text()) if self.compiled else kept.get("shared", 0)
        super().__init__(path.stem, text or "", shared)

    def ask(self, question: str, work: Callable[[Kernel], Any]) -> Any:
        known, answer = question in self.answers, self.answers.get(question)
        assert known or self.compiled, f"{self.name}, {question}: not recorded: make compiled"
        if self.compiled:
            fresh = json.loads(json.dumps(work(self)))
            assert not known or fresh == answer or WRITING, f"{question}: {fresh}, recorded is {answer}: make compiled"
            answer = fresh
        self.collected[question] = answer
        return answer


class Compilation:
    """Of a target's name, its kernels by name.

    Test processes that share `folder` compile for a target once. `whole`: kernels that are recorded are compiled, too.
    """

    def __init__(self, folder: Path, whole: bool) -> None:
        self._pattern = os.environ.get(ENV_KERNELS, "")
        self._anew = whole or WRITING or bool(self._pattern)
        self._folder, self._processes = folder, list[subprocess.Popen]()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._futures: dict[str, Future[Kernels]] = {}

    def start(self, target: str) -> None:
        """Begins to compile for a target."""
        if target not in self._futures:
            self._futures[target] = self._pool.submit(self._compiled, target)

    def __call__(self, target: str) -> Kernels:
        self.start(target)
        return self._futures[target].result()

    def _compiled(self, target: str) -> Kernels:
        known, folder = recorded(target), self._folder / target
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with its process
            if not (folder / "complete").exists():
                for begun in folder.glob("*.key"):  # by processes that were ended
                    begun.unlink()
                (folder / "keys").write_text("\n".join(each["key"] for each in known.values() if not self._anew))
                self._run(target, folder)
                (folder / "complete").touch()
        return {path.stem: CompiledKernel(path, known.get(path.stem, {})) for path in sorted(folder.glob("*.key"))}

    def _run(self, target: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.compile_kernels", target, folder, self._pattern, folder / "keys"]
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
        with (folder / "errors").open("w") as errors:
            given = dict(cwd=ROOT, env=environment, stdout=errors, stderr=subprocess.STDOUT)
            started = [subprocess.Popen(command, **given) for _ in range(1 + self._anew)]
            self._processes += started
            wrong = [process.wait(patient(_LIMIT_S)) for process in started]
        assert not any(wrong), f"{target}: {(folder / 'errors').read_text()[-4000:]}"

    def write(self) -> None:
        """The record anew: an answer a line, sorted, so that a difference shows which code has changed in what."""
        for target, future in self._futures.items():
            kernels = {n: dict(key=k.key, shared=k.shared, answers=k.collected) for n, k in future.result().items()}
            kept = {"triton": version("triton"), "checks": checks(), "kernels": kernels}
            (RECORDS / f"{target}.json").write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")

    def close(self) -> None:
        """Ends what nobody waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
