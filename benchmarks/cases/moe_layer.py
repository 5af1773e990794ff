"""One rank's part of a mixture of experts as `benchmarks.moe` measures it: shapes, uneven routing, and the truth.

Routing: each token takes the top k of normal logits, to which the experts' popularity is added: -skew * log(place), the
places shuffled. With a skew of 0.5 the busiest of 128 experts has about four times the mean, as in published traces of
real models. `load` in a result is that factor, as it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools

from iris_ops.activation import GPT_OSS, Activation
import torch
from torch.nn import functional as F

ROTATED_BYTES = 300 << 20  # what calls in a row read, at least: several times the L2 cache
MOST_BYTES = 24 << 30
SKEW = 0.5
CHECKED = 8  # tokens


@dataclass(frozen=True)
class Shape:
    """`width`: an expert's intermediate size, which the ranks share."""

    hidden: int
    width: int
    experts: int
    top_k: int
    activation: Activation = Activation()
    gpt_oss: bool = False
    """Gate and up in turn, weights stored [E,H,2I] and [E,I,H], and biases."""


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, GPT_OSS, True),
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, GPT_OSS, True),
}
TINY = {"tiny": Shape(32, 48, 6, 2), "tiny-gpt-oss": Shape(32, 48, 6, 2, GPT_OSS, True)}


class Layer:
    """Weights of one rank, several copies, and routings that rotate with them; the same tokens on all ranks."""

    def __init__(self, shape: Shape, world: int, rank: int, device: torch.device, rotate: bool) -> None:
        self.shape, self.rank, self.device = shape, rank, device
        self.width = shape.width // world
        touched = 3 * shape.hidden * self.width * 2 * shape.top_k
        whole = 3 * shape.hidden * self.width * 2 * shape.experts
        copies = max(1, min(8, ROTATED_BYTES // touched, MOST_BYTES // whole)) if rotate else 1
        self.gate_up = [self._drawn(shape.hidden, 2 * self.width) for _ in range(copies)]
        self.down = [self._drawn(self.width, shape.hidden) for _ in range(copies)]
        self.gate_up_bias = self.down_bias = None
        if shape.gpt_oss:
            self.gate_up_bias = torch.randn(shape.experts, 2 * self.width, device=device).to(torch.bfloat16)
            shared = torch.Generator(device).manual_seed(1)
            bias = torch.randn(shape.experts, shape.hidden, device=device, generator=shared)
            self.down_bias = bias.to(torch.bfloat16)
        self.calls = max(4, copies)

    def _drawn(self, rows: int, cols: int) -> torch.Tensor:
        """Draw [E, rows, cols], stored as the model does."""
        size = (rows, cols) if self.shape.gpt_oss else (cols, rows)
        matrix = torch.empty(self.shape.experts, *size, dtype=torch.bfloat16, device=self.device)
        matrix.normal_(std=rows**-0.5)
        return matrix if self.shape.gpt_oss else matrix.transpose(1, 2)

    @functools.cached_property
    def by_outputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the weights as [E, 2 I, H] and [E, H, I], contiguous: copies where the model stores them otherwise."""
        pairs = zip(self.gate_up, self.down, strict=True)
        return [(a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()) for a, b in pairs]

    def tokens(self, count: int) -> None:
        """Draw tokens, and for each call the experts that they go to."""
        shape, generator = self.shape, torch.Generator().manual_seed(count)
        rows = torch.randn(count, shape.hidden, generator=generator)
        self.A = rows.to(self.device, torch.bfloat16)
        popular = -SKEW * torch.arange(1, shape.experts + 1).float().log()
        popular = popular[torch.randperm(shape.experts, generator=generator)]
        self.chosen, self.weights = [], []
        for _ in range(self.calls):
            logits = torch.randn(count, shape.experts, generator=generator) + popular
            best, experts = logits.topk(shape.top_k, dim=1)
            self.chosen.append(experts.to(self.device))
            self.weights.append(best.softmax(1).to(self.device))

    def weights_of(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_up[call % len(self.gate_up)], self.down[call % len(self.down)]

    def described(self) -> dict:
        """Return how many experts have tokens, and how many times the mean the busiest has: means over the routings."""
        counts = torch.stack([each.flatten().bincount(minlength=self.shape.experts) for each in self.chosen]).float()
        touched = (counts > 0).sum(1).float().mean().item()
        load = (counts.max(1).values / counts.mean(1)).mean().item()
        return {"touched": touched, "load": load, "nbytes": touched * 3 * self.shape.hidden * self.width * 2}

    def exact(self) -> torch.Tensor:
        """Return the first tokens of call 0 in float64, this rank's part of the sum."""
        gate_up, down = self.weights_of(0)
        total = torch.zeros(min(CHECKED, len(self.A)), self.shape.hidden, dtype=torch.float64, device=self.device)
        for t in range(len(total)):
            for expert, weight in zip(self.chosen[0][t].tolist(), self.weights[0][t].tolist(), strict=True):
                both = self.A[t].double() @ gate_up[expert].double()
                both += self.gate_up_bias[expert].double() if self.gate_up_bias is not None else 0
                row = activated(both, self.shape) @ down[expert].double()
                row += self.down_bias[expert].double() if self.down_bias is not None and self.rank == 0 else 0
                total[t] += weight * row
        return total


def activated(both: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Apply what rivals and the truth put between the products; [..., 2 I] -> [..., I]."""
    if not shape.gpt_oss:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    gate, up = both[..., 0::2], both[..., 1::2]
    gate, up = gate.clamp(max=shape.activation.limit), up.clamp(-shape.activation.limit, shape.activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * shape.activation.alpha))
