"""Compiles every kernel ahead of time for one target: `python -m tests.compile_kernels sm_90 DIR [PATTERN] [KEYS]`.

PATTERN, a regular expression, selects cases of `tests/kernel_cases.py` and `tests/user_kernel_cases.py` by name. KEYS
is a file with the keys of kernels that need not be compiled. Writes DIR/<case>.key for all, DIR/<case>.<ptx or amdgcn>
and DIR/<case>.shared for what it compiles. Needs no GPU. A process of its own, because the interpreter must be off;
several with one empty DIR share the work.

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
_init = _Function.__init__


def _read_bare_source(self: Any, *args: Any, **named: Any) -> None:
    _init(self, *args, **named)
    self._src = bare(self._src)


# Before the library makes functions: kernels have no comments and docstrings, and each stands in line 0.
_Function.__init__ = _read_bare_source
_Function.starting_line_number = property(lambda self: 0, lambda self, line: None)

from tests import fake_gpu  # noqa: E402


def record_launches(sources: list[tuple[Any, Any, dict]]) -> None:
    """Add to `sources` what the compiler would be given for each launch from now on. Nothing is compiled or runs."""
    run, whole = jit.JITFunction.run, triton.compiler.compile

    def stop(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        sources.append((source, target, options))
        return SimpleNamespace()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        triton.compiler.compile = stop
        kernel.device_caches.clear()
        try:
            run(kernel, *args, grid=(1, 1, 1), warmup=True, **named)
        finally:
            triton.compiler.compile = whole
            kernel.device_caches.clear()

    jit.JITFunction.run = record


def key_of(source: Any, target: Any, options: dict) -> str:
    """A digest of all that decides the kernel's code."""
    from iris import platform, triton_private

    def known(given: Any) -> Any:
        """Constants, with keys in place of functions."""
        return (
            [known(each) for each in given] if isinstance(given, tuple | list) else getattr(given, "cache_key", given)
        )

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
    if fake_gpu.TARGETS[name].backend == "hip":
        os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"
    from tests import kernel_cases, user_kernel_cases

    known = Path(keys).read_text().split() if keys else ()
    sources: list[tuple[Any, Any, dict]] = []
    record_launches(sources)
    for case, call, kind in kernel_cases.cases(fake_gpu.TARGETS[name], user_kernel_cases.users):
        path = Path(folder, f"{case}.key")
        if not re.search(pattern, case):
            continue
        try:
            path.touch(exist_ok=False)
        except FileExistsError:  # another process has it
            continue
        number, kernel = kind.pop("launch", -1), kind.pop("kernel", "")
        try:
            with mode:
                rank = fake_gpu.fake_rank(**kind)
                sources.clear()
                call(rank)
                source, target, options = [each for each in sources if kernel in each[0].fn.fn.__name__][number]
                key = key_of(source, target, options)
            path.write_text(key)
            if key not in known:
                compiled = triton.compile(source, target=target, options=options)
                check_loads(compiled.asm)
                suffix = ".ptx" if target.backend == "cuda" else ".amdgcn"
                path.with_suffix(".shared").write_text(str(compiled.metadata.shared))
                path.with_suffix(suffix).write_text(compiled.asm[suffix[1:]])
        except Exception:
            wrong += 1
            print(case, traceback.format_exc(), file=sys.stderr)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
