"""Compiles every kernel ahead of time for one target: `python -m tests.compile_kernels sm_90 DIR [PATTERN] [KEYS]`.

PATTERN, a regular expression, selects cases of `tests/kernel_cases.py` by name. KEYS is a file with the keys of kernels
that need not be compiled. Writes DIR/<case>.key for all, DIR/<case>.<ptx or amdgcn> and DIR/<case>.shared for what it
compiles. Needs no GPU. A process of its own, because the interpreter must be off; several with one empty DIR share the
work.

A key digests all that decides a kernel's code: versions, target, options, signature, constants, and the syntax trees
of the kernel's functions, in which comments, docstrings and line numbers do not appear.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from pathlib import Path
import re
import sys
import traceback
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import jit  # noqa: E402

from tests.bare import bare  # noqa: E402

_Function = getattr(jit, "JITCallable", jit.JITFunction)


def read_bare_sources() -> None:
    """Has triton read kernels without comments and docstrings, as if each stood in line 0, and so know them by that."""
    made = _Function.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self._src = bare(self._src)

    _Function.__init__ = init
    _Function.starting_line_number = property(lambda self: 0, lambda self, line: None)


read_bare_sources()  # before the library makes functions

from tests import fake_gpu  # noqa: E402


class Launches:
    """What is launched from now on: nothing runs, and nothing is compiled before it is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, tuple, dict]] = []
        self._run, launches = jit.JITFunction.run, self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            launches.seen.append((kernel, args, named))

        jit.JITFunction.run = run

    def source(self, number: int, kernel: str = "") -> tuple[Any, GPUTarget, dict]:
        """What the compiler would be given for one of the launches, or the last of `kernel`; forgets them all."""
        seen = [each for each in self.seen if not kernel or each[0].fn.__name__ == kernel]
        (function, args, named), found = seen[number], []
        self.seen.clear()

        def stop(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
            found.append((source, target, options))
            return SimpleNamespace()

        kept, triton.compiler.compile = triton.compiler.compile, stop
        function.device_caches.clear()
        try:
            self._run(function, *args, grid=(1, 1, 1), warmup=True, **named)
        finally:
            triton.compiler.compile = kept
            function.device_caches.clear()
        return found[0]


def key_of(source: Any, target: GPUTarget, options: dict) -> str:
    """A digest of all that decides the kernel's code."""
    from iris import platform, triton_private

    backend = triton.compiler.make_backend(target)
    changed = [bare(inspect.getsource(module)) for module in (triton_private, platform)]  # outside of kernels
    constants = repr(_known(sorted(source.constants.items())))
    parts = (
        triton.__version__,
        backend.hash(),
        backend.parse_options(options).hash(),
        source.hash(),
        constants,
        *changed,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _known(given: Any) -> Any:
    """Constants, with keys in place of functions."""
    return [_known(each) for each in given] if isinstance(given, tuple | list) else getattr(given, "cache_key", given)


def main(name: str, folder: str, pattern: str = "", keys: str = "") -> None:
    os.nice(5)  # other tests run meanwhile
    mode = fake_gpu.pretend(name)
    if fake_gpu.TARGETS[name].backend == "hip":
        os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"
    from tests import kernel_cases

    known = set(Path(keys).read_text().split()) if keys else set()
    launches, wrong = Launches(), 0
    for case, call, kind in kernel_cases.cases(fake_gpu.TARGETS[name]):
        if not re.search(pattern, case):
            continue
        try:
            Path(folder, f"{case}.begun").touch(exist_ok=False)
        except FileExistsError:
            continue
        print(case, flush=True)
        number, kernel = kind.pop("launch", -1), kind.pop("kernel", "")
        try:
            with mode:
                rank = fake_gpu.fake_rank(**kind)
                launches.seen.clear()
                call(rank)
                source, target, options = launches.source(number, kernel)
                key = key_of(source, target, options)
            Path(folder, f"{case}.key").write_text(key)
            if key not in known:
                compiled = triton.compile(source, target=target, options=options)
                kind = "ptx" if target.backend == "cuda" else "amdgcn"
                Path(folder, f"{case}.shared").write_text(str(compiled.metadata.shared))
                Path(folder, f"{case}.{kind}").write_text(compiled.asm[kind])
        except Exception:
            wrong += 1
            print(case, traceback.format_exc(), file=sys.stderr)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
