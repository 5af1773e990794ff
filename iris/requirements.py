"""Check the version of triton before anything of triton is imported.

Under another version iris would fail deep inside, at some name which that version lacks. So the version is checked
first. It is read from the source of the module that `import triton` would take, not from pip's metadata: a copy of
triton on PYTHONPATH, before the installed one, has none.
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
    """Raise `VersionError` where there is no triton, or one of an unsupported version."""
    version = triton_version()
    if version is None:
        raise VersionError(f"iris {__version__} needs triton, which is not installed: pip install '{SUPPORTED}'")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and not LEAST <= numbers < BELOW:
        raise VersionError(
            f"triton is {version}, with torch {torch.__version__}; iris {__version__} is written for {SUPPORTED}. "
            f"Each CUDA build of torch requires one triton, so take both: pip install 'torch>=2.10,<2.16' '{SUPPORTED}'"
        )


def namesake() -> str:
    """Return a warning if SciTools' package, which is also called `iris`, is installed; else "".

    pip puts both into one folder, and the one that is installed last replaces files of the other.
    """
    try:
        other = metadata.version(_NAMESAKE)
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"{_NAMESAKE} {other} is installed together with iris-tp {__version__}: both have a package `iris`, and files "
        f"of one may have replaced the other's. Install them in separate environments, and install iris-tp again"
    )


def warn_of_namesake() -> None:
    if text := namesake():
        warnings.warn(text, RuntimeWarning, stacklevel=3)


@functools.cache
def triton_version() -> str | None:
    """Return the version of the triton that this process imports; "" where it has none, None without triton."""
    if "triton" in sys.modules:
        return getattr(sys.modules["triton"], "__version__", "")
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", Path(spec.origin).read_text(), re.MULTILINE)
    return match[1] if match else ""


def versions() -> str:
    """Return the versions that all ranks must share, as one line."""
    return f"iris {__version__}, torch {torch.__version__}, triton {triton_version()}"
