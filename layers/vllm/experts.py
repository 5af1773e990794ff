"""Mixtures of experts in the graphs that vLLM compiles: which layers this library runs, and by which operators.

vLLM runs a mixture, its router included, as one operator that finds the layer by a name, and a sum over ranks follows.
Both become one operator here. The router and its choice stay vLLM's.

    torch.ops.iris_vllm.experts_all_reduce(x, logits, layer_name, group) -> sum over ranks of the mixture of x [T,H]
    torch.ops.iris_vllm.experts_all_reduce_rms_norm(x, logits, layer_name, residual, norm_weight, eps, group)
                                                    -> (normed, h)

`logits` are the router's, [T,E], or `x` for a layer that computes them. `h` is `residual` plus the sum, and `normed`
its RMSNorm. A layer's name is an argument of the graph, so layers that are alike share a compiled graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from iris_ops.local.norm import add_rms_norm
from iris_ops.moe.torch_ops import MixtureCall, mixture
import torch

from . import ops

if TYPE_CHECKING:
    from iris.context import Iris


def mixture_class() -> Any:
    """Return vLLM's class of mixtures, or None for a version in which a plug-in cannot replace it, as in 0.33."""
    try:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoE
        from vllm.model_executor.layers.fused_moe.runner import moe_runner
        from vllm.utils import torch_utils
    except ImportError:
        return None
    used = (FusedMoE, "register_oot"), (moe_runner, "get_layer_from_name"), (torch_utils, "LayerNameType")
    return FusedMoE if all(hasattr(*each) for each in used) else None


def refusal(layer: Any) -> str | None:
    """Return why vLLM keeps a mixture `layer`, a `FusedMoE`, or None where the operators here compute the same."""
    try:
        return _refusal(layer)
    except (AttributeError, ImportError) as error:
        return f"another version of vLLM: {error}"


def _refusal(layer: Any) -> str | None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    config, runner = layer.moe_config, layer.runner
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    if backend != UnquantizedMoeBackend.TRITON:  # others store weights in an order of their own
        return f"experts in {type(layer.quant_method).__name__}, backend {backend}"
    if config.activation != MoEActivation.SILU or not config.is_act_and_mul or config.swiglu_limit is not None:
        return f"activation {config.activation}"
    if config.has_bias:
        return "experts with a bias"
    if config.is_lora_enabled:
        return "experts with LoRA"
    if max(config.ep_size, config.dp_size, config.pcp_size) > 1 or config.is_sequence_parallel:
        return "experts that are split otherwise than by tensor parallelism"
    if layer.eplb_state is not None or layer.apply_router_weight_on_input:
        return "experts that are balanced, or weighted before their products"
    if runner.shared_experts is not None or runner.shared_expert_gate is not None:
        return "a shared expert"
    weights = layer.w13_weight, layer.w2_weight
    if any(each.dtype != torch.bfloat16 or not each.is_contiguous() for each in weights):
        return f"experts in {weights[0].dtype}"
    return None


def all_served(layers: Iterable[Any]) -> bool:
    """Return whether the operators here run every mixture among vLLM's `layers`, and there is one."""
    mixtures = [layer for layer in layers if hasattr(layer, "w13_weight")]
    return bool(mixtures) and all(refusal(layer) is None for layer in mixtures)


def experts(
    ctx: Iris, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum over ranks of a mixture: x [T,H], gate_up [E,2I,H], down [E,H,I], chosen and weights [T,k]."""
    return mixture(ctx, MixtureCall(x, gate_up.transpose(1, 2), down.transpose(1, 2), chosen, weights))


def define() -> None:
    """Register the operators. Their names of layers have the type that vLLM's own operators take."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import get_layer_from_name
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def experts_all_reduce(ctx: Iris, x: torch.Tensor, logits: torch.Tensor, layer_name: Any) -> torch.Tensor:
        layer = get_layer_from_name(_resolve_layer_name(layer_name))
        runner = layer.runner
        if runner.gate is not None:
            logits, _ = runner.gate(x)
        weights, chosen = runner.router.select_experts(hidden_states=x, router_logits=logits)
        return experts(ctx, x, layer.w13_weight, layer.w2_weight, chosen, weights)

    def experts_all_reduce_rms_norm(
        ctx: Iris, x: torch.Tensor, logits: torch.Tensor, layer_name: Any, residual: torch.Tensor,
        norm_weight: torch.Tensor, eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        h, normed = add_rms_norm(experts_all_reduce(ctx, x, logits, layer_name), residual, norm_weight, eps)
        return normed, h

    name = type_in_schemas(LayerNameType)
    ops.define(
        "experts_all_reduce", f"(Tensor x, Tensor logits, {name} layer_name, str group) -> Tensor",
        experts_all_reduce, lambda x, logits, layer_name, group: torch.empty_like(x),
    )  # fmt: skip
    ops.define(
        "experts_all_reduce_rms_norm",
        f"(Tensor x, Tensor logits, {name} layer_name, Tensor residual, Tensor norm_weight, float eps, str group) "
        "-> (Tensor, Tensor)",
        experts_all_reduce_rms_norm,
        lambda x, logits, layer_name, *rest: (torch.empty_like(x), torch.empty_like(x)),
    )


def type_in_schemas(kind: type) -> str:
    """Return the name by which the schema of an operator calls an argument's type."""

    def operator(argument: Any) -> None: ...

    operator.__annotations__ = {"argument": kind, "return": None}
    return torch.library.infer_schema(operator, mutates_args=()).removeprefix("(").partition(" ")[0]
