"""The table of a GPU's measured rates: `iris-tp calibrate` writes it into the user's cache, and plans read it.

A table is a JSON file named after the GPU. It holds the rates by the names of the fields of `Machine` and `LinkRates`,
and what they were derived from. Plans of several ranks must be equal, so the ranks compare their rates when a context
is created. A file that cannot be used is an error, never ignored: a rank that skipped it would plan differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
import json
import math
import os
from pathlib import Path
import re
from typing import Any

from .errors import PlatformError

ENV_RATES = "IRIS_RATES"
DATA_SHEET = "data-sheet"
"""The value of the environment variable that ignores measured tables."""
FORMAT = 1
"""Of the file, and of what its rates mean: a planner that reckons otherwise takes the next number."""
DEVICE_RATES = (
    "tflops", "library_tflops", "fp32_tflops", "hbm_gbs", "link_gbs", "launch_us", "hop_us", "exchange_us"
)  # fmt: skip
"""Fields of `Machine` that a table may hold."""
COLLECTIVE_RATES = (
    "link_gbs", "lamport_gbs", "pair_gbs", "two_hops_gbs", "launch_us", "hop_us", "signal_us", "enter_us"
)  # fmt: skip
"""Fields of `LinkRates` that a table may hold."""


@dataclass(frozen=True)
class Table:
    """Measured rates of the GPU `name` with `num_programs` multiprocessors, among `ranks` of them."""

    name: str
    num_programs: int
    ranks: int
    date: str
    """The day of the measurement, as 2026-11-28."""
    versions: Mapping[str, str]
    rates: Mapping[str, float]
    """GB/s, TFLOP/s and microseconds of one GPU, by the names in `DEVICE_RATES`."""
    collectives: Mapping[str, float]
    """The same of collectives, by the names in `COLLECTIVE_RATES`."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    """Microseconds of each call from which the rates were derived."""

    def source(self, path: Path) -> str:
        """Return where the rates come from, for people."""
        return f"measured with {self.ranks} GPUs on {self.date} by iris-tp calibrate, {path}"


def cache_folder() -> Path:
    """Return the folder of this library in the user's cache: `$XDG_CACHE_HOME/iris-tp`, or `~/.cache/iris-tp`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iris-tp"


def path_of(name: str) -> Path:
    """Return the file with the rates of the GPU `name`: `$IRIS_RATES` if that names a file, else one in the cache."""
    if requested := os.environ.get(ENV_RATES, ""):
        return Path(requested)
    return cache_folder() / "rates" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def read(name: str, num_programs: int) -> tuple[Table, Path] | None:
    """Return the table of the GPU `name` and its file; None if there is none, or `$IRIS_RATES` is "data-sheet".

    Raises `PlatformError` for a file that cannot be read, is malformed or outdated, or belongs to another GPU.
    """
    requested = os.environ.get(ENV_RATES, "")
    if requested == DATA_SHEET:
        return None
    path = path_of(name)
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        if requested:
            raise PlatformError(
                f"{ENV_RATES} is {requested!r}, which is not a file; expected one, or {DATA_SHEET!r}"
            ) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"the measured rates {path} cannot be read: {error}; {_REMEDY}") from None
    try:
        table = parse(text)
    except ValueError as error:
        raise PlatformError(f"the measured rates {path} cannot be used: {error}; {_REMEDY}") from None
    if (table.name, table.num_programs) != (name, num_programs):
        raise PlatformError(
            f"the measured rates {path} are of {table.name} with {table.num_programs} multiprocessors, and this is "
            f"{name} with {num_programs}; {_REMEDY}"
        )
    return table, path


def parse(text: str) -> Table:
    """Return the table that a file's `text` spells. Raises `ValueError` with the reason where it spells none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, expected an object")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r}, expected {FORMAT}: another version wrote it")
    for key, kind in _KINDS.items():
        if not isinstance(content.get(key), kind) or isinstance(content.get(key), bool):
            raise ValueError(f"{key} is {content.get(key)!r}, expected {_NAMES[kind]}")
    for key, names in (("rates", DEVICE_RATES), ("collectives", COLLECTIVE_RATES)):
        if unknown := sorted(set(content[key]) - set(names)):
            raise ValueError(f"{key} has {unknown[0]!r}, expected some of {', '.join(names)}")
        for name, value in content[key].items():
            if not _is_rate(name, value):
                raise ValueError(f"{name} of {key} is {value!r}, expected a finite number greater than 0")
    return Table(**{key: content[key] for key in _KINDS})


def text_of(table: Table) -> str:
    """Return the text of `table`'s file. Raises `ValueError` for one that `parse` would refuse."""
    text = json.dumps({"format": FORMAT, **asdict(table)}, indent=1) + "\n"
    parse(text)
    return text


def write(table: Table) -> Path:
    """Write `table` where `read` finds it, in one step, and return the file.

    Raises `PlatformError` where it cannot be written.
    """
    path, text = path_of(table.name), text_of(table)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):  # it has its new name, or could not be made
            partial.unlink()
    return path


def check_writable(name: str) -> Path:
    """Return the file of the GPU `name`'s table; raise `PlatformError` if `write` would fail."""
    if os.environ.get(ENV_RATES) == DATA_SHEET:
        raise PlatformError(f"{ENV_RATES} is {DATA_SHEET!r}, which ignores measured rates; unset it to measure them")
    path = path_of(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, "no permission")
    return path


def _unwritable(path: Path, error: Any) -> PlatformError:
    return PlatformError(
        f"the measured rates cannot be written to {path}: {error}; expected a folder that can be written, which "
        f"XDG_CACHE_HOME names, or a file that {ENV_RATES} names"
    )


def _is_rate(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 if name == "enter_us" else value > 0


_REMEDY = "run iris-tp calibrate again, or delete the file to plan by the data sheet"
_KINDS: dict[str, type] = {
    "name": str, "num_programs": int, "ranks": int, "date": str,
    "versions": dict, "rates": dict, "collectives": dict, "measurements": dict,
}  # fmt: skip
_NAMES = {str: "a text", int: "an integer", dict: "an object"}
