"""The one way in which functions become torch operators: opaque nodes of the graphs that torch.compile makes.

A compiler knows the schema of an operator and its fake, and never looks inside. Operators are functional: their results
are new tensors, and they have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
import hashlib
from typing import Any

import torch
from torch.compiler import config


class Operators:
    """The operators of one namespace. Registrations last as long as this object.

    torch keeps compiled graphs on disk. Their code spells out the arguments of an operator, but the key of a graph does
    not contain the schema. So a graph of another version could pass arguments that no longer exist. A digest of all
    schemas therefore joins `torch.compiler.config.cache_key_tag`.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._schemas: list[str] = []

    def add(self, schema: str, kernel: Callable, fake: Callable, exact_strides: bool = True) -> Any:
        """Register `kernel` as the operator of `schema`, and return the operator.

        `fake`: takes the same arguments, as tensors without data, and returns empty tensors of the results' shapes.
        `exact_strides`: whether compilers keep the strides of tensors. A compiler that changes the strides of
        a transposed weight copies the weight in every step.
        """
        name = schema.partition("(")[0]
        self._library.define(schema, tags=(torch.Tag.needs_exact_strides,) if exact_strides else ())
        self._library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        self._schemas.append(schema)
        self._tag_caches()
        return getattr(getattr(torch.ops, self._namespace), name)

    def _tag_caches(self) -> None:
        """Write the digest of the schemas into the key of torch's caches, beside what else is there."""
        own = f"{self._namespace}:"
        digest = hashlib.sha256("\n".join(sorted(self._schemas)).encode()).hexdigest()[:16]
        others = [tag for tag in config.cache_key_tag.split(",") if tag and not tag.startswith(own)]
        config.cache_key_tag = ",".join([*others, own + digest])


OPERATORS = Operators("iris_ops")
