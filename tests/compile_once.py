"""Under torchrun the ranks want the same kernels at the same time: one compiles each, the others load what it kept."""

from collections.abc import Callable
import fcntl
import hashlib
import os
from pathlib import Path
import tempfile

import triton.compiler

_FOLDER = Path(tempfile.gettempdir(), f"iris-compiling-{os.getuid()}")


def prepare() -> None:
    """For kernels that this process compiles from now on. Before the first of them is launched."""
    _FOLDER.mkdir(exist_ok=True)
    triton.compiler.compile = _in_turn(triton.compiler.compile)


def _in_turn(whole: Callable) -> Callable:
    def compiled(src, target=None, options=None, **named):
        kind = hashlib.sha256(f"{src.hash()} {target} {sorted((options or {}).items())}".encode()).hexdigest()
        with open(_FOLDER / kind, "w") as file:  # locks end with their process
            fcntl.flock(file, fcntl.LOCK_EX)
            return whole(src, target=target, options=options, **named)

    return compiled
