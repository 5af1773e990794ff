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
from triton.runtime import jit  # noqa: E402

from tests.bare import bare  # noqa: E402

_Function = getattr(jit, "JITCallable", jit.JITFunction)
_init, _run = _Function.__init__, jit.JITFunction.run
_sources: list[tuple[Any, Any, dict]] = []  # what the compiler would be given for each launch


def _read_bare_source(self: Any, *args: Any, **named: Any) -> None:
    _init(self, *args, **named)
    self._src = bare(self._src)


def _stop(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
    _sources.append((source, target, options))
    return SimpleNamespace()


def _record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    kernel.device_caches.clear()
    _run(kernel, *args, grid=(1, 1, 1), warmup=True, **named)


# Before the library makes functions: kernels have no comments and docstrings, and each stands in line 0. Nothing runs.
_Function.__init__ = _read_bare_source
_Function.starting_line_number = property(lambda self: 0, lambda self, line: None)
jit.JITFunction.run, triton.compiler.compile = _record, _stop

from tests import fake_gpu  # noqa: E402


def key_of(source: Any, target: Any, options: dict) -> str:
    """A digest of all that decides the kernel's code."""
    from iris import platform, triton_private

    def known(given: Any) -> Any:
        """Constants, with keys in place of functions."""
        if isinstance(given, tuple | list):
            return [known(each) for each in given]
        return getattr(given, "cache_key", given)

    backend = triton.compiler.make_backend(target)
    changed = [bare(inspect.getsource(module)) for module in (triton_private, platform)]  # outside of kernels
    parts = triton.__version__, backend.hash(), backend.parse_options(options).hash(), source.hash()
    digested = "\n".join([*parts, repr(known(sorted(source.constants.items()))), *changed])
    return hashlib.sha256(digested.encode()).hexdigest()[:20]


def check_loads(asm: dict[str, str]) -> None:
    """Raise where the compiler repeats a volatile load, as it may for another layout: the two can see two values."""
    counts = [len(re.findall(r"tt\.load .*isVolatile = true", asm[name])) for name in ("ttir", "ttgir") if name in asm]
    if len(set(counts)) > 1:
        raise AssertionError(f"{counts[0]} volatile loads became {counts[1]}")


def main(name: str, folder: str, pattern: str = "", keys: str = "") -> None:
    os.nice(5)  # other tests run meanwhile
    mode, wrong = fake_gpu.pretend(name), 0
    suffix = {"cuda": ".ptx", "hip": ".amdgcn"}[fake_gpu.TARGETS[name].backend]
    os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"
    from tests import kernel_cases

    known = Path(keys).read_text().split() if keys else ()
    for case, call, kind in kernel_cases.cases(name):
        path = Path(folder, f"{case}.key")
        if not re.search(pattern, case):
            continue
        try:
            path.touch(exist_ok=False)
        except FileExistsError:  # another process has it
            continue
        number = kind.pop("launch", -1)
        try:
            with mode:
                rank = fake_gpu.fake_rank(**kind)
                _sources.clear()
                call(ctx=rank)
                source, target, options = _sources[number]
                key = key_of(source, target, options)
            path.write_text(key)
            if key not in known:
                compiled = triton.compile(source, target=target, options=options)
                check_loads(compiled.asm)
                path.with_suffix(".shared").write_text(str(compiled.metadata.shared))
                path.with_suffix(suffix).write_text(compiled.asm[suffix[1:]])
        except Exception:
            wrong += 1
            print(case, traceback.format_exc(), file=sys.stderr)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
