"""Which modules a configuration names: three libraries, three ways to write it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
import re

from iris.errors import CheckpointError


def names_module(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of transformers' `modules_to_not_convert` names `module`.

    A pattern is a name, the beginning of one up to a dot, a regular expression for either, or the end of a name.
    """
    return any(module.endswith(each) or _matches(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", module, each) for each in patterns)


def targets_module(module: str, targets: Sequence[str]) -> bool:
    """Whether one of compressed-tensors' `targets` or `ignore` names `module`: its name, or `re:` and an expression."""
    return any(
        _matches(each.removeprefix("re:"), module, each) if each.startswith("re:") else module == each
        for each in targets
    )


def excludes_module(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of ModelOpt's `exclude_modules` names `module`, or what it is in; `*` stands for anything."""
    return any(fnmatchcase(module, each) or module.startswith(f"{each}.") for each in patterns)


def _matches(expression: str, name: str, written: str) -> bool:
    try:
        return re.match(expression, name) is not None
    except re.error as error:
        raise CheckpointError(
            f"the configuration has the pattern {written!r}, which is no expression: {error}"
        ) from None
