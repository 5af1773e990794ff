"""Replicated parameters, which every rank has in full: in debug mode ranks compare them before each forward.

A change in place must be the same on all ranks: norms, embeddings, routers and the biases of row-parallel layers are
copies. Random noise over `parameters()` is not, even from one seed: shards may differ in size, so the
ranks' generators diverge after the first split weight. Draw the noise on one rank and broadcast it, or draw the noise
of each parameter from a generator that is seeded by the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from .sharded import ShardedLinear, part_of

_SAMPLE = 4096  # elements that reveal a change through `.data`, which does not change `_version`


def replicated(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each parameter of a split `model` that all ranks have in full."""
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or part_of(module, key) is not None:
                continue
            if isinstance(module, ShardedLinear) and not (key == "bias" and module.dim == 1):
                continue
            yield f"{prefix}.{key}".lstrip("."), parameter


class Replicas:
    """The digests of a model's replicated parameters, computed again where a parameter has changed."""

    def __init__(self, digest: Callable[[torch.Tensor], str]) -> None:
        self._digest = digest
        self._known: dict[str, tuple[tuple, str]] = {}

    def digests(self, model: nn.Module) -> dict[str, str]:
        """Return the digest of each replicated parameter of `model` by name."""
        for name, parameter in replicated(model):
            sample = parameter.detach().flatten()[:_SAMPLE]
            state = parameter.data_ptr(), parameter._version, self._digest(sample)
            if self._known.get(name, (None,))[0] != state:
                self._known[name] = state, self._digest(parameter)
        return {name: digest for name, (_, digest) in self._known.items()}
