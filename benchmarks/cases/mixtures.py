"""Mixtures of experts for `benchmarks.llm`: their shapes, routers with uneven load, and the rival's two products.

A router that is drawn at random like other weights sends each expert about as many tokens. Those of trained models do
not: the busiest of 64 to 256 experts gets some two to four times the mean, the idlest next to nothing. So the rows of a
random router, one an expert, are scaled by exp(SPREAD * n), n normal. A row of larger norm has wider logits and is more
often among the largest. `load` measures the effect, and the benchmark prints it:

    experts, of which a token takes    8, 2    32, 4    128, 8    128, 4    256, 8
    the busiest, times the mean         1.2     2.0       3.1       4.5       5.2
    the idlest                         0.76    0.24      0.04      0.01      0.00
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
import torch.distributed as dist
from torch.nn import functional as F

SPREAD = 0.25

# name: (architecture, sizes)
SHAPES: dict[str, tuple[str, dict]] = {
    "mixtral-8x7b": ("Mixtral", dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                     num_attention_heads=32, num_key_value_heads=8, num_local_experts=8,
                                     num_experts_per_tok=2, rope_theta=1e6)),
    "qwen3-30b-a3b": ("Qwen3Moe", dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144,
                                       moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
                                       num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                                       norm_topk_prob=True, rope_theta=1e6)),
    "gpt-oss-20b": ("GptOss", dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
                                   num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32,
                                   num_experts_per_tok=4, sliding_window=128)),
    "gpt-oss-120b": ("GptOss", dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
                                    num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128,
                                    num_experts_per_tok=4, sliding_window=128)),
    # one layer of 11.5 billion parameters after the first three: pass --layers
    "deepseek-v3": ("DeepseekV3", dict(vocab_size=129280, hidden_size=7168, intermediate_size=18432,
                                       moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
                                       num_key_value_heads=128, n_routed_experts=256, n_shared_experts=1,
                                       num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
                                       q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                       v_head_dim=128)),
}  # fmt: skip
# What the sizes become in `tiny-<name>`, to try the benchmark on CPUs: all kinds of layers and of weights, few of each.
_TINY = dict(vocab_size=128, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=8, num_experts=8,
             n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
             q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
             sliding_window=4)  # fmt: skip


def tiny(sizes: dict) -> dict:
    """Return `sizes` of a shape with every number as small as it may be."""
    small = {key: _TINY.get(key, value) for key, value in sizes.items()}
    if "kv_lora_rank" in sizes:  # latent attention has a key head for each query head
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


SHAPES |= {f"tiny-{name}": (architecture, tiny(sizes)) for name, (architecture, sizes) in SHAPES.items()}


def routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `model` that choose experts, by name."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__.lower().endswith("router") and weight is not None and weight.dim() == 2:
            yield name, module


@torch.no_grad()
def make_uneven(model: nn.Module, seed: int = 3) -> None:
    """Scale the rows of each router of a drawn model, alike on all ranks."""
    random = torch.Generator().manual_seed(seed)
    for _, router in routers(model):
        scale = torch.exp(SPREAD * torch.randn(router.weight.shape[0], 1, generator=random))
        router.weight.mul_(scale.to(router.weight))


def top_k_of(model: nn.Module) -> int:
    """Return how many experts a token goes to; 0 where there are none."""
    return int(getattr(model.config, "num_experts_per_tok", None) or 0)


@torch.no_grad()
def load(model: nn.Module, top_k: int, tokens: int = 4096) -> tuple[float, float] | None:
    """Return what the busiest and the idlest expert get of the mean, for normal random tokens; means over layers."""
    highest, lowest, count = 0.0, 0.0, 0
    random = torch.Generator().manual_seed(5)
    for _, router in routers(model):
        weight = router.weight.float().cpu()
        x = torch.randn(tokens, weight.shape[1], generator=random)
        chosen = (x @ weight.t()).topk(top_k, -1).indices
        counts = torch.bincount(chosen.flatten(), minlength=weight.shape[0]).float()
        highest, lowest = highest + float(counts.max() / counts.mean()), lowest + float(counts.min() / counts.mean())
        count += 1
    return (highest / count, lowest / count) if count else None


class GroupedOps:
    """The ops of a mixture as torch's grouped product and NCCL give them: tokens sorted by expert, two products."""

    def moe_route(self, experts, num_experts):
        return experts

    def moe_gate_up(self, out, A, B, experts, bias=None, activation="silu", interleaved=False, scale=None) -> None:
        order = experts.flatten().argsort(stable=True)
        chosen = experts.flatten()[order]
        y = grouped(A[order // experts.shape[1]], B, chosen)
        if bias is not None:
            y += bias[chosen]
        gate, up = y, None
        if B.shape[2] == 2 * out.shape[1]:
            gate, up = (y[:, ::2], y[:, 1::2]) if interleaved else y.chunk(2, -1)
        out[order] = activated(activation, gate, up)

    def moe_down_all_reduce(self, out, A, B, experts, weights, bias=None, shared=None, scale=None) -> None:
        order = experts.flatten().argsort(stable=True)
        y = torch.empty(len(order), B.shape[2], dtype=A.dtype, device=A.device)
        y[order] = grouped(A[order], B, experts.flatten()[order])
        if bias is not None and dist.get_rank() == 0:
            y += bias[experts.flatten()]
        y = y.view(*experts.shape, -1) * weights.unsqueeze(-1).to(y.dtype)
        torch.sum(y, 1, out=out)
        if shared is not None:
            out += shared
        dist.all_reduce(out)


def grouped(A: torch.Tensor, B: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return row i of A times B[chosen[i]], `chosen` in order: torch's grouped bf16 product on GPUs, else singly."""
    counts = torch.bincount(chosen, minlength=len(B)) if not A.is_cuda else None
    if counts is None and A.dtype == torch.bfloat16:
        edges = torch.arange(1, len(B) + 1, device=A.device)
        ends = torch.searchsorted(chosen.contiguous(), edges).to(torch.int32)
        return torch._grouped_mm(A, B, offs=ends)
    counts = torch.bincount(chosen, minlength=len(B)) if counts is None else counts
    parts = A.split(counts.tolist())
    return torch.cat([part @ each for part, each in zip(parts, B, strict=True)])


def activated(activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    from iris_ops.activation import activation_of

    kind = activation_of(activation)
    if kind.limit is not None:
        gate = gate.clamp(max=kind.limit)
        up = None if up is None else up.clamp(-kind.limit, kind.limit)
    if kind.kind == "silu":
        y = F.silu(gate) if kind.alpha == 1.0 else gate * torch.sigmoid(kind.alpha * gate)
    elif kind.kind == "relu2":
        y = F.relu(gate).square()
    else:
        y = F.gelu(gate, approximate="tanh" if kind.kind == "gelu_tanh" else "none")
    return y if up is None else y * (up + kind.shift)
