"""Match names of modules against the patterns of a configuration, as each of three libraries writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
import re
from typing import Any

from iris.errors import CheckpointError

from ..together import shown


def patterns_of(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of patterns `config[key]`. Raises `CheckpointError` for anything else."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise CheckpointError(f"{key} is {shown(repr(value))}: expected a list of names")
    for each in value:
        if each.startswith("re:"):
            try:
                re.compile(each.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(f"{key} has {shown(repr(each))}, which is not a pattern: {error}") from None
    return value


def names_module(module: str, patterns: Sequence[str]) -> bool:
    """Return whether one of transformers' `modules_to_not_convert` names `module`.

    A pattern is a name, the beginning of one up to a dot, a regular expression for either, or the end of a name.
    """
    return any(module.endswith(each) or _begins(module, each) for each in patterns)


def targets_module(module: str, targets: Sequence[str]) -> bool:
    """Return whether one of compressed-tensors' `targets` or `ignore`, a name or an `re:` pattern, names `module`."""
    return any(
        re.match(each.removeprefix("re:"), module) is not None if each.startswith("re:") else module == each
        for each in targets
    )


def excludes_module(module: str, patterns: Sequence[str]) -> bool:
    """Return whether one of ModelOpt's `exclude_modules`, with `*` for anything, names `module` or its parent."""
    return any(fnmatchcase(module, each) or module.startswith(f"{each}.") for each in patterns)


def _begins(module: str, pattern: str) -> bool:
    try:
        return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return False  # a plain name with signs of expressions in it
