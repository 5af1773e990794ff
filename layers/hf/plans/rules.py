"""Build plans from common parts."""

from __future__ import annotations

from collections.abc import Iterable

COLUMN, ROW = "colwise", "rowwise"
GATHER, SLICE = "colwise_gather_output", "rowwise_split_input"
PACKED, EXPERTS, WHOLE = "packed_colwise", "moe_tp_experts", "replicate"
RECURRENT = "recurrent_heads"

QKV = ("q_proj", "k_proj", "v_proj")


def below(stacks: str | Iterable[str], *rules: dict[str, str]) -> dict[str, str]:
    """Return `rules` for the modules below each of `stacks`."""
    stacks = (stacks,) if isinstance(stacks, str) else stacks
    return {f"{stack}.{name}": style for stack in stacks for each in rules for name, style in each.items()}


def attention(name: str = "self_attn", projections: Iterable[str] = QKV, output: str = "o_proj") -> dict[str, str]:
    """Return rules for whole heads on each rank. An empty `name`: the projections are in the layer itself."""
    prefix = f"{name}." if name else ""
    return {**{prefix + each: COLUMN for each in projections}, prefix + output: ROW}


def gathered(name: str, projections: Iterable[str], output: Iterable[str] = ()) -> dict[str, str]:
    """Return rules for all heads on each rank: weights are split, outputs gathered."""
    return {**{f"{name}.{each}": GATHER for each in projections}, **{f"{name}.{each}": SLICE for each in output}}


def mlp(
    name: str = "mlp", first: Iterable[str] = ("gate_proj", "up_proj"), second: str = "down_proj"
) -> dict[str, str]:
    """Return rules for the linears before and after the activation."""
    prefix = f"{name}." if name else ""
    return {**{prefix + each: COLUMN for each in first}, prefix + second: ROW}


HEAD = {name: GATHER for name in ("lm_head", "embed_out", "output_projection", "proj_out", "head", "decoder", "output",
                                  "lm_loss", "pred_layer.proj", "generator_lm_head")}  # fmt: skip
LLAMA = {**attention(), **mlp()}
# What all heads share, `q_a_proj` and `kv_a_proj_with_mqa`, is small and stays whole.
LATENT = attention(projections=("q_proj", "q_b_proj", "kv_b_proj"))
LLAMA_PLAN = {**below("model.layers.*", LLAMA), **HEAD}
