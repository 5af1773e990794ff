"""Rivals for a mixture of experts: torch's grouped product, or vLLM's kernels, followed by an all-reduce.

grouped_mm   tokens sorted by argsort, torch._grouped_mm, the activation, torch._grouped_mm, the weighted sum: as
             transformers' grouped_mm experts do it. The activation and the weighted sum are compiled where torch can.
vLLM         its fused_experts, where vLLM is importable: the Triton kernels that vLLM takes for 16-bit weights on
             Hopper, with the tiles that vLLM has tuned for the GPU and these sizes, or else with its default ones

After grouped_mm comes NCCL, or torch's one-shot or two-shot all-reduce on symmetric memory; after vLLM's its own custom
all-reduce, or NCCL from 8 MiB on, as in vLLM without multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.cases.moe_layer import Layer, activated
from benchmarks.rivals import of_vllm
from benchmarks.rivals.of_torch import symmetric_memory

Product = Callable[[int], torch.Tensor]
Captures = dict[str, Callable[[], AbstractContextManager]]


def has_vllm(team: Team) -> bool:
    """Return whether vLLM's kernels can be loaded on all ranks; say so where not."""
    if not team.cuda or not of_vllm.installed(team):
        return False
    _, reason = team.attempt(_load_vllm)
    if reason:
        team.say(f"without vLLM: {reason}")
    return not reason


def _load_vllm() -> None:
    of_vllm.settle()
    from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]  # noqa: F401


def rivals_of(
    team: Team, layer: Layer, largest: int, compiled: bool, with_vllm: bool
) -> tuple[dict[str, Product], Captures]:
    """Return calls by name, and what some are to be captured in. `largest`: elements of any result of this layer."""
    if not hasattr(torch, "_grouped_mm") or not team.cuda:
        product = plainly(layer)
        return {"torch + NCCL": _nccl(product), "torch alone": product}, {}
    product = grouped(layer, compiled)
    shared = symmetric_memory(largest, torch.bfloat16, team.device)
    calls = {
        "grouped_mm + NCCL": _nccl(product),
        "grouped_mm + one-shot": _symmetric(product, shared, False),
        "grouped_mm + two-shot": _symmetric(product, shared, True),
        "grouped_mm alone": product,
    }
    captures: Captures = {}
    if with_vllm:
        product = vllm(layer)
        if of_vllm.supports(layer.A.nbytes, team.world, layer.A.dtype):
            name = "vLLM + custom all-reduce"
            calls[name] = _custom(product, team.device)
            captures[name] = partial(of_vllm.capturing, team.device)
        else:
            calls["vLLM + NCCL"] = _nccl(product)
        calls["vLLM alone"] = product
    return calls, captures


def _nccl(product: Product) -> Product:
    def call(i: int) -> torch.Tensor:
        out = product(i)
        dist.all_reduce(out)
        return out

    return call


def _symmetric(product: Product, shared: torch.Tensor, two_shot: bool) -> Product:
    group = dist.group.WORLD.group_name

    def call(i: int) -> torch.Tensor:
        local = product(i)
        out = shared[: local.numel()].view(local.shape)
        out.copy_(local)
        if two_shot:
            return torch.ops.symm_mem.two_shot_all_reduce_(out, "sum", group)
        return torch.ops.symm_mem.one_shot_all_reduce(out, "sum", group)

    return call


def grouped(layer: Layer, compiled: bool) -> Product:
    """Return the product by torch._grouped_mm."""
    shape = layer.shape

    def between(both: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
        return activated(both if bias is None else both + bias[experts], shape)

    def summed(
        rows: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, weights: torch.Tensor,
        back: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        rows = rows if bias is None else rows + bias[experts]
        by_token = rows[back].view(*weights.shape, -1)
        return (by_token.float() * weights[..., None]).sum(1).to(rows.dtype)

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


def plainly(layer: Layer) -> Product:
    """Return the product on CPUs, one expert after the other."""

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


def vllm(layer: Layer) -> Product:
    """Return vLLM's fused_experts, as its unquantized layers call it on Hopper."""
    from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # type: ignore[import-not-found]
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config  # type: ignore[import-not-found]

    chosen = [experts.to(torch.int32) for experts in layer.chosen]  # as its own router gives them
    activation = MoEActivation.SWIGLUOAI if layer.shape.gpt_oss else MoEActivation.SILU
    once = layer.down_bias
    if once is not None and layer.rank != 0:
        once = torch.zeros_like(once)
    biases = biased_moe_quant_config(layer.gate_up_bias, once)

    def call(i: int) -> torch.Tensor:
        first, second = layer.by_outputs[i % len(layer.by_outputs)]
        return fused_experts(
            layer.A, first, second, layer.weights[i], chosen[i], activation=activation, quant_config=biases
        )

    return call


def vllm_tiles(layer: Layer) -> str:
    """Return which tiles vLLM takes for this layer: "tuned" for this GPU, or its "default" ones."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    return "default" if get_moe_configs(layer.shape.experts, layer.width, None) is None else "tuned"


def _custom(product: Product, device: torch.device) -> Product:
    def call(i: int) -> torch.Tensor:
        local = product(i)
        return of_vllm.reduced(device, local, torch.empty_like(local))

    return call
