"""Compiled kernels for tests: of which target and which forms, by which processes, and what is recorded of them.

`tests/compile_kernels.py` compiles in processes of its own, a target once, from the first test on: with a lower
priority, while ranks of other tests wait for each other. What is recorded (`tests/record.py`) is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
import fcntl
import os
from pathlib import Path
import queue
import subprocess
import sys
import threading
import time
from typing import Any
import warnings

from tests import record
from tests.assembly import UNTRACED, Kernel, Kernels
from tests.processes import ROOT, python_path
from tests.untraced import copy_untraced

ENV_KERNELS = "IRIS_TEST_KERNELS"
_PROCESSES = {"sm_90": 2}  # which has as many kernels as two others
_LEAST_LIMIT_S, _TIMES_THE_SLOWEST = 300.0, 20.0  # of one kernel's compilation


class CompiledKernel(Kernel):
    """One that answers from the record where its digest is recorded; `text` is None where it was not compiled."""

    def __init__(self, name: str, digest: str, text: str | None, shared: int, recorded: dict[str, Any]) -> None:
        super().__init__(name, text or "", shared)
        self.digest, self.answers = digest, recorded
        self.compiled = text is not None
        self.asked: dict[str, Any] = {}
        self.compile: Callable[[], str] = lambda: ""

    @property
    def text(self) -> str:
        if not self.compiled:
            self._text, self.compiled = self.compile(), True
        return self._text

    def ask(self, question: str, work: Callable[[Kernel], Any]) -> Any:
        answer = record.answered(self.answers, question, lambda: work(self), trusted=not self.compiled)
        self.asked[question] = answer
        return answer


class Compilation:
    """Of a target's name, its kernels by name; those of `UNTRACED` are without any call that records events.

    Without those that are rare, unless `whole`; only those whose names match the environment's `IRIS_TEST_KERNELS`,
    where it is set: for tests of these. What is recorded is not compiled, unless `whole`, or the record is written.

    Test processes that share `folder` compile for a target once. Triton's cache keeps what was compiled before, by the
    hashes of its sources and of triton.
    """

    def __init__(self, folder: Path, whole: bool) -> None:
        self.whole = whole or ENV_KERNELS in os.environ  # whose pattern says what is wanted
        self._recorded = not whole and not record.WRITING
        self._folder = folder
        self._processes: list[subprocess.Popen] = []
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
        folder = self._folder / target.replace(" ", "_")
        self._once(target, folder, "complete", recorded=self._recorded and target != UNTRACED)
        known = record.read(target)
        kernels: Kernels = {}
        for path in sorted(folder.glob("*.digest")):
            name, digest, text = path.stem, path.read_text(), _text(path)
            kept = known.get(name)
            if kept is None or kept.digest != digest:
                kept = record.Known(digest, shared=0)
            shared = kept.shared if text is None else int(path.with_suffix(".shared").read_text())
            kernels[name] = kernel = CompiledKernel(name, digest, text, shared, kept.answers)
            kernel.compile = lambda path=path: self._text_of(target, path)
        return kernels

    def _text_of(self, target: str, path: Path) -> str:
        """Of a kernel that is asked what the record does not say. The others will be, too, so all are compiled."""
        warnings.warn(
            f"{path.stem} is asked what tests/compiled/{target}.json does not say: make compiled", stacklevel=2
        )
        self._once(target, path.parent, "whole", recorded=False)
        return _text(path)

    def _once(self, target: str, folder: Path, done: str, recorded: bool) -> None:
        """Compiles, unless another test process has or does."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with its process
            if not (folder / done).exists():
                self._compile(target, folder, recorded)
                (folder / done).touch()

    def _compile(self, target: str, folder: Path, recorded: bool) -> None:
        source, name = ROOT, target
        if target == UNTRACED:
            name, source = "sm_90", folder / "source"
            copy_untraced(source)
        pattern = os.environ.get(ENV_KERNELS, "" if self.whole else "-")
        command = [sys.executable, "-m", "tests.compile_kernels", name, str(folder), pattern]
        command += ["recorded"] * recorded
        # the path is for what `copy_untraced` leaves here
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
        for begun in folder.glob("*.begun"):  # by processes that were ended
            begun.unlink()
        errors = folder / "errors"
        count = 1 if recorded and record.read(name) else _PROCESSES.get(name, 1)
        with errors.open("w") as said:
            started = [
                subprocess.Popen(command, cwd=source, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
                for _ in range(count)
            ]
            self._processes += started
            with ThreadPoolExecutor(len(started)) as following:
                stuck = list(following.map(_followed, started))
        assert not any(stuck), f"{target}: {', '.join(stuck)}"
        assert not any(process.returncode for process in started), errors.read_text()[-4000:]

    def write(self) -> None:
        """The record anew, of all that was asked."""
        for target, found in self._found.items():
            kernels = {name: record.Known(k.digest, k.shared, k.asked) for name, k in found.result().items()}
            record.write(target, kernels)
            digests = sorted((self._folder / target.replace(" ", "_")).glob("*.digest"))
            record.write_sources(target, {each.with_suffix(".key").read_text(): each.read_text() for each in digests})

    def close(self) -> None:
        """Ends what nobody waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()


def _followed(process: subprocess.Popen) -> str:
    """Waits for a process that prints the name of each kernel before it compiles it. Says which one is stuck, if any.

    How long one may take follows from the slowest before it, so a machine that is slow or busy meets no limit.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line.strip())
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    name, slowest, begin = "starting", _LEAST_LIMIT_S / _TIMES_THE_SLOWEST, time.monotonic()
    while True:
        limit = max(_LEAST_LIMIT_S, _TIMES_THE_SLOWEST * slowest)
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            process.kill()
            return f"{name} has not been compiled in {limit:.0f} s, the slowest before took {slowest:.0f} s"
        now = time.monotonic()
        name, slowest, begin = line, max(slowest, now - begin), now
        if not line:
            process.wait()
            return ""


def _text(path: Path) -> str | None:
    """The assembly of the kernel with this digest, if it was compiled."""
    return next(
        (path.with_suffix(kind).read_text() for kind in (".ptx", ".amdgcn") if path.with_suffix(kind).exists()), None
    )
