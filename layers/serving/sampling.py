"""Choose an engine's tokens: the likeliest, or one drawn among those that hold `top_p` of the probability.

The choice is made on the device, from tensors that a graph may replay. Every rank draws from a generator of the
engine's own, seeded alike on all ranks, so the same logits give the same tokens on each of them.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
import torch

if TYPE_CHECKING:
    from iris.context import Iris

_COLDEST, _HOTTEST = 1e-30, 1e30  # below, logits overflow; above, all tokens are alike
_PARTS = 256  # at most, of the vocabulary, whose likeliest tokens are computed in parallel


class Sampler:
    """The choice of tokens: greedy until `set` changes that. `random`: the generator of samples."""

    def __init__(self, device: torch.device) -> None:
        self.greedy = True
        self.temperature = torch.ones((), device=device)
        self.top_p = torch.ones((), device=device)
        self.random = torch.Generator(device)

    def set(self, temperature: float, top_p: float) -> None:
        """Set the sampling parameters of the next tokens; `temperature` 0: the likeliest."""
        self.greedy = temperature == 0
        if not self.greedy:
            self.temperature.fill_(min(max(temperature, _COLDEST), _HOTTEST))
            self.top_p.fill_(top_p)

    def share_seed(self, ctx: Iris, seed: Any) -> None:
        """Seed every rank's generator with rank 0's `seed`, which torch's generator there draws if it is None.

        Collective. Raises `ArgumentError` for a seed that is no integer of 64 bits.
        """
        seed = ctx.broadcast(int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed)
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ArgumentError(f"seed is {seed!r} on rank 0: expected None or an integer of 64 bits")
        self.random.manual_seed(seed)

    @property
    def generator(self) -> torch.Generator | None:
        """Return the generator that draws the next tokens; None if they are greedy."""
        return None if self.greedy else self.random

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the chosen tokens [rows, 1] of logits [rows, vocabulary]."""
        if self.greedy:
            return likeliest(logits)
        probable, order = (logits.float() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = probable.cumsum(-1) - probable
        nucleus = probable.masked_fill(before >= self.top_p, 0)
        # Of independent exponential arrivals with these rates, each is first with the probability of its rate.
        arrivals = torch.empty_like(nucleus).exponential_(generator=self.random)
        return order.gather(-1, (nucleus / arrivals).argmax(-1, keepdim=True))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits.argmax(-1, keepdim=True)` of [rows, vocabulary] in two steps: torch gives a row one program."""
    parts = gcd(logits.shape[-1], _PARTS)
    best, at = logits.unflatten(-1, (parts, -1)).max(-1)
    part = best.argmax(-1, keepdim=True)
    return part * (logits.shape[-1] // parts) + at.gather(-1, part)
