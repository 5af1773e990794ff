"""What people run for a mixture of experts: torch's grouped product, or vLLM's kernel, and an all-reduce behind it.

grouped_mm   tokens sorted by argsort, torch._grouped_mm, the activation, torch._grouped_mm, the weighted sum: as
             transformers' grouped_mm experts do it. The activation and the weighted sum are compiled where torch can.
vLLM         its fused_experts, where vLLM is importable

and behind either NCCL, or torch's one-shot or two-shot all-reduce on symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable

from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.moe_layer import Layer, activated
from benchmarks.rivals_torch import symmetric_memory


def rivals_of(team: Team, layer: Layer, largest: int, compiled: bool) -> dict[str, Callable[[int], torch.Tensor]]:
    """By name. `largest`: elements of any result of this layer."""
    products = {"grouped_mm": grouped(layer, compiled)}
    if found := vllm(layer):
        products["vLLM"] = found
    if not hasattr(torch, "_grouped_mm") or not team.cuda:
        products = {"torch": plainly(layer)}
    calls: dict[str, Callable[[int], torch.Tensor]] = {}
    for name, product in products.items():
        calls[f"{name} + NCCL"] = _nccl(product)
        if team.cuda:
            shared = symmetric_memory(largest, torch.bfloat16, team.device)
            calls[f"{name} + one-shot"] = _symmetric(product, shared, False)
            calls[f"{name} + two-shot"] = _symmetric(product, shared, True)
        calls[f"{name} alone"] = product
    return calls


def _nccl(product: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    def call(i: int) -> torch.Tensor:
        out = product(i)
        dist.all_reduce(out)
        return out

    return call


def _symmetric(
    product: Callable[[int], torch.Tensor], shared: torch.Tensor, two_shot: bool
) -> Callable[[int], torch.Tensor]:
    group = dist.group.WORLD.group_name

    def call(i: int) -> torch.Tensor:
        found = product(i)
        out = shared[: found.numel()].view(found.shape)
        out.copy_(found)
        if two_shot:
            return torch.ops.symm_mem.two_shot_all_reduce_(out, "sum", group)
        return torch.ops.symm_mem.one_shot_all_reduce(out, "sum", group)

    return call


def grouped(layer: Layer, compiled: bool) -> Callable[[int], torch.Tensor]:
    """By torch._grouped_mm."""
    shape = layer.shape

    def between(both: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
        return activated(both if bias is None else both + bias[experts], shape)

    def summed(
        rows: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, weights: torch.Tensor,
        back: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        rows = rows if bias is None else rows + bias[experts]
        found = rows[back].view(*weights.shape, -1)
        return (found.float() * weights[..., None]).sum(1).to(rows.dtype)

    def sort(chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        order = chosen.flatten().argsort(stable=True)
        experts = chosen.flatten()[order]
        bounds = torch.arange(1, shape.experts + 1, device=chosen.device)
        ends = torch.searchsorted(experts, bounds).to(torch.int32)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return order, experts, ends, back

    if compiled:
        between, summed = (torch.compile(each, dynamic=True) for each in (between, summed))

    def call(i: int) -> torch.Tensor:
        gate_up, down = layer.weights_of(i)
        order, experts, ends, back = sort(layer.chosen[i])
        rows = layer.A[order // shape.top_k]
        middle = between(torch._grouped_mm(rows, gate_up, offs=ends), layer.gate_up_bias, experts)
        bias = layer.down_bias if layer.rank == 0 else None
        return summed(torch._grouped_mm(middle, down, offs=ends), bias, experts, layer.weights[i], back)

    return call


def plainly(layer: Layer) -> Callable[[int], torch.Tensor]:
    """On CPUs: an expert after the other."""

    def call(i: int) -> torch.Tensor:
        gate_up, down = layer.weights_of(i)
        out = torch.zeros(len(layer.A), layer.shape.hidden, device=layer.device)
        for expert in range(layer.shape.experts):
            t, j = (layer.chosen[i] == expert).nonzero(as_tuple=True)
            both = layer.A[t] @ gate_up[expert]
            both = both + layer.gate_up_bias[expert] if layer.gate_up_bias is not None else both
            rows = activated(both, layer.shape) @ down[expert]
            rows = rows + layer.down_bias[expert] if layer.down_bias is not None and layer.rank == 0 else rows
            out.index_add_(0, t, layer.weights[i][t, j, None] * rows.float())
        return out.to(layer.A.dtype)

    return call


def vllm(layer: Layer) -> Callable[[int], torch.Tensor] | None:
    """vLLM's fused_experts; None where vLLM, or what of it serves this layer, is not there."""
    if layer.shape.gpt_oss:
        return None
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]
    except Exception:  # not installed, or without its kernels
        return None

    def call(i: int) -> torch.Tensor:
        gate_up, down = layer.weights_of(i)
        first, second = gate_up.transpose(1, 2), down.transpose(1, 2)
        return fused_experts(layer.A, first, second, layer.weights[i], layer.chosen[i].to(torch.int32))

    return call
