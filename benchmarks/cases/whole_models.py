"""The models that generate, by a shape's name or from a checkpoint's folder, split over the ranks.

Weights are random unless the model is a folder. They are drawn on each rank's device, so that a 70B shape starts in
seconds: split ones by the rank's own seed, whole ones by one seed for all.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.cases import mixtures

_LLAMA3 = dict(vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5)
# name: (architecture, sizes)
SHAPES: dict[str, tuple[str, dict]] = {
    "llama-3-8b": ("Llama", dict(_LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                 num_attention_heads=32)),
    "llama-3-70b": ("Llama", dict(_LLAMA3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                                  num_attention_heads=64)),
    "qwen3-32b": ("Qwen3", dict(vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
                                num_attention_heads=64, num_key_value_heads=8, head_dim=128, rope_theta=1e6)),
    "tiny": ("Llama", dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=4)),
    **mixtures.SHAPES,
}  # fmt: skip


def config_of(name: str, depth: int | None = None):
    """Return the configuration of a shape by name, or of a checkpoint's folder, with `depth` layers if given."""
    import transformers

    if name in SHAPES:
        architecture, sizes = SHAPES[name]
        longest = {"max_position_embeddings": 1 << 17, "eos_token_id": None}
        config = getattr(transformers, f"{architecture}Config")(**longest, **sizes)
    else:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if depth:
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[:depth]
    return config


def config_for_others(name: str, depth: int | None = None):
    """Return `config_of`, as other engines read it from a folder: with the name of the model's class."""
    config = config_of(name, depth)
    if name in SHAPES:
        config.architectures = [f"{SHAPES[name][0]}ForCausalLM"]
    return config


def build(name: str, depth: int | None, ctx, dtype: torch.dtype) -> nn.Module:
    """Build a split model without sequence parallelism: random weights for a shape, the checkpoint's for a folder."""
    import layers
    from layers.checkpoint.load import _compute_buffers

    if Path(name).is_dir():
        if depth:
            raise SystemExit("--layers goes with a model shape: a checkpoint is loaded whole")
        return layers.from_pretrained(name, ctx, dtype=dtype, sequence_parallel=False)
    model = empty_model(config_of(name, depth), dtype)
    layers.parallelize(model, ctx, sequence_parallel=False)
    draw(model, ctx)
    _compute_buffers(model, ctx.device)
    return model.eval()


def empty_model(config, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)


class Draws:
    """Random numbers for the parameters of an empty split model: split ones by the rank's seed, others alike."""

    def __init__(self, ctx) -> None:
        self._ctx = ctx
        self._alike, self._own = (torch.Generator(ctx.device).manual_seed(seed) for seed in (1, 2 + ctx.cur_rank))

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Allocate and fill a module's own parameters: matrices at random, norms with ones, biases zero."""
        from layers.sharded import ShardedLinear, part_of

        split = isinstance(module, ShardedLinear)
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty_like(parameter, device=self._ctx.device)
            if parameter.dim() < 2:
                value.fill_(0 if name == "bias" else 1)
            else:
                value.normal_(std=0.02, generator=self._own if split or part_of(module, name) else self._alike)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def finish(self, model: nn.Module) -> None:
        """Fill buffers that are stored, as corrections of a router are, and make routers uneven."""
        for name, buffer in model.named_buffers():  # others are computed
            if buffer.is_meta:
                set_buffer(model, name, torch.zeros_like(buffer, device=self._ctx.device))
        mixtures.make_uneven(model)


def draw(model: nn.Module, ctx) -> None:
    """Allocate and fill the parameters of an empty split model."""
    draws = Draws(ctx)
    for module in model.modules():
        draws.fill(module)
    draws.finish(model)


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, value)


def share_buffers(model: nn.Module, split: nn.Module) -> None:
    """Give `model` those buffers of `split` that are stored."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    for name in [name for name, _ in model.named_buffers() if name not in computed]:
        set_buffer(model, name, split.get_buffer(name))
