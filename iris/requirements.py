"""Which versions of triton iris works with, checked before anything of triton is imported.

Under another version iris would fail deep inside, at some name which that version lacks. So the version is looked at
first. It is read from the source of the module that `import triton` would take, not from pip's notes: a copy of triton
on PYTHONPATH, in front of the installed one, has no such note.
"""

from __future__ import annotations

import functools
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
import re
import sys
import warnings

import torch

from .errors import VersionError
from .version import __version__

LEAST, BELOW = (3, 6), (3, 10)  # of triton, as pyproject.toml has them
_NAMESAKE = "scitools-iris"
SUPPORTED = "triton>={}.{},<{}.{}".format(*LEAST, *BELOW)


def check_triton() -> None:
    """Raises `VersionError` where there is no triton, or one of another version than this is written for."""
    found = triton_version()
    if found is None:
        raise VersionError(f"iris {__version__} needs triton, which is not installed: pip install '{SUPPORTED}'")
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers and not LEAST <= numbers < BELOW:
        raise VersionError(
            f"triton is {found}, beside torch {torch.__version__}; iris {__version__} is written for {SUPPORTED}. "
            f"Each CUDA build of torch requires one triton, so take both: pip install 'torch>=2.10,<2.16' '{SUPPORTED}'"
        )


def namesake() -> str:
    """Return what to say of the other package called `iris`, SciTools', where it is installed; else nothing.

    pip puts both into one folder, and the one that is installed last replaces files of the other.
    """
    try:
        other = metadata.version(_NAMESAKE)
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"{_NAMESAKE} {other} is installed beside iris-tp {__version__}: both have a package `iris`, and files of one "
        f"may have replaced the other's. Give each an environment of its own, and install iris-tp again in its own"
    )


def warn_of_namesake() -> None:
    if text := namesake():
        warnings.warn(text, RuntimeWarning, stacklevel=3)


@functools.cache
def triton_version() -> str | None:
    """Of the triton that this process has imported or would import; "" where it does not say, None without any."""
    if "triton" in sys.modules:
        return getattr(sys.modules["triton"], "__version__", "")
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    said = re.search(r"^__version__ = ['\"]([^'\"]+)", Path(spec.origin).read_text(), re.MULTILINE)
    return said[1] if said else ""


def versions() -> str:
    """The versions that all ranks must have alike, as one line."""
    return f"iris {__version__}, torch {torch.__version__}, triton {triton_version()}"
