"""To which lengths an engine pads prompts: few graphs then run all of them, and ranks can share their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ..hf.sequence import Sharing
from .prefill_attention import length_on_grid

GRAPH_TOKENS = 8192  # of prompts that are captured: of more, the device takes longer than the host
_HOST_LIMITED = 2.5e11  # tokens times a layer's weights, some 0.8 ms: below it the host is slower than the device
_MORE_TOKENS = 64  # or an eighth: extra tokens up to that cost little compared with the weights


@dataclass
class Lengths:
    """The lengths of an engine's prompts. `most`: of a row, with all that is generated."""

    most: int
    ranks: int
    weights: float
    """A rank's weights, over the layers."""
    sharing: Sharing | None
    """How ranks share the tokens of a call, if they do."""
    recurrent: bool
    """Whether a layer keeps a state, which would include padding."""

    def captured(self, batch: int, length: int) -> int:
        """Return the length at which prompts that are read by a graph are padded."""
        longest = self.most - 1  # those that fill the cache are compiled apart
        longer = _common_length(batch, length, self.weights)
        longer = max(length, min(longer, longest - longest % self.step(batch)))
        return longer if batch * longer <= GRAPH_TOKENS else length

    def sharable(self, batch: int, length: int) -> int:
        """Return the next length at which ranks can share the tokens, if the model does and there are enough."""
        if self.sharing is None or self.recurrent or not self.sharing.has_enough(batch * length):
            return length
        longer = -(-length // self.step(batch)) * self.step(batch)
        return longer if longer <= self.most else length

    def step(self, batch: int) -> int:
        """Return the step between lengths at which all ranks of a sequence-parallel call have as many tokens."""
        return 1 if self.sharing is None else self.ranks // gcd(batch, self.ranks)


def _common_length(batch: int, length: int, weights: float) -> int:
    """Return the length to which prompts are padded, so that one graph runs all that are a little shorter.

    Only where the host is the limit, so that extra tokens cost nothing. `weights`: a rank's, over the layers.
    """
    most = max(1, _MORE_TOKENS // batch)
    longer = length_on_grid(length, 1 << most.bit_length() - 1)  # whole steps of it fit between two powers of two
    return longer if batch * longer * weights <= _HOST_LIMITED else length
