"""Compute the logits before rounding, and the error that a contender may have.

Two runs in bf16 that round in other places differ by some percent of their logits, by more the deeper the model. Their
difference alone shows neither which is nearer the truth nor how much is too much. So the truth is computed: the same
split model and weights, with everything in float32 (of float32 models in float64), products by cuBLAS without TF32,
sums by NCCL. A decoder layer at a time is widened and dropped again, so that a model that fills the GPUs fits.

One pass over prompts and a token each gives the logits after both. Costs 2 x weights x tokens operations at the GPUs'
float32 rate: of a 70B model on four H200s 0.1 s at 128 tokens, 7 s at 8192. So only as many of a batch's prompts are
compared as make `TOKENS`, one at least.

A contender's error is measured against that, and so is the error of cuBLAS + NCCL in the same row. `limit` is ALLOWED
times the latter and FLOOR eps more; and whoever misses by MOST of the logits is wrong whatever the other does.

With weights in fp8 the truth is that of the rounded weights. On GPUs each product's input is rounded to e4m3 too, whose
steps are 16 times those of bf16; of random models of 2 and 32 layers the logits missed by 7 and 6 times as much. So FP8
times as much is accepted there, up to MOST_FP8.

In a mixture of experts rounding may turn a router's choice, and with it the whole output of an expert: cuBLAS + NCCL
missed by 0.55 of the last logits of one prompt. So up to MOST_MIXTURE is accepted there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from iris_tp.bench.team import Team
import torch
from torch import nn

TOKENS = 4096
ALLOWED = 1.5
FLOOR = 2
MOST = 0.5  # of the root mean square; logits that have nothing to do with each other differ by 1.4
MOST_MIXTURE = 1.0
FP8, MOST_FP8 = 8, 1.0

Convert = Callable[[nn.Module, str, torch.Tensor, torch.dtype], torch.Tensor]


def as_it_is(module: nn.Module, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return parameter.to(dtype)


def rows_compared(batch: int, prompt: int) -> int:
    return min(batch, max(1, TOKENS // prompt))


@torch.no_grad()
def true_logits(
    model: nn.Module, tokens: torch.Tensor, length: int, convert: Convert = as_it_is
) -> dict[str, torch.Tensor]:
    """Return logits after all but the last of `tokens` [rows, n], and after all; `length`: of the cache, more than n.

    `convert` makes a wider parameter of each.
    """
    from layers.serving.cache import cache_name, static_cache

    torch.backends.cuda.matmul.allow_tf32 = False
    wide = torch.float64 if model.dtype == torch.float32 else torch.float32
    with widened(model, wide, convert), repeated_heads(model):
        logits = model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape),
            **{cache_name(model): static_cache(model, 1, length)},
            use_cache=True,
            logits_to_keep=2,
        ).logits
    return {"prompt": logits[:, 0], "step": logits[:, 1]}


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype, convert: Convert = as_it_is) -> Iterator[None]:
    """Give each part of `model` parameters in `dtype` while it runs, inside the block, and only then."""
    saved: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}

    def widen(part: nn.Module, _inputs) -> None:
        owned = [(module, name, p) for module in part.modules() for name, p in module._parameters.items()]
        saved[part] = [(module, name, p) for module, name, p in owned if p is not None]
        for module, name, p in saved[part]:
            module._parameters[name] = nn.Parameter(convert(module, name, p, dtype), requires_grad=False)

    def restore(part: nn.Module, *_) -> None:
        for module, name, p in saved.pop(part):
            module._parameters[name] = p

    handles = []
    for part in _parts(model):
        if type(part) is nn.Embedding and convert is as_it_is:  # its rows are wide enough; whole it may not fit besides
            handles.append(part.register_forward_hook(lambda _part, _inputs, rows: rows.to(dtype)))
            continue
        handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in list(saved):  # that raised
            restore(part)


@contextmanager
def repeated_heads(model: nn.Module) -> Iterator[None]:
    """Repeat kv heads before torch's attention, inside the block: grouped ones in float32 would store all scores.

    A model that attends in a way of its own, as one with sinks does, keeps it.
    """
    from layers.serving import attention
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, key, value, attention_mask, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
        ungrouped = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
        return sdpa_attention_forward(ungrouped, query, key, value, attention_mask, **options)

    before = model.config._attn_implementation
    if before in attention.OWN:
        AttentionInterface.register("repeated_heads", attend)
        AttentionMaskInterface.register("repeated_heads", sdpa_mask)
        model.set_attn_implementation("repeated_heads")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers, one by one, and the parts around them."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(inside, nn.ModuleList) for inside in child.modules()):
            yield from _parts(child)
        else:
            yield child


def errors(team: Team, logits: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the root mean square error of a contender's logits, over that of the true ones; the worst rank counts."""
    relative = {}
    for name, value in logits.items():
        expected = truth[name.partition(",")[0]]
        missed = value[: len(expected)].to(expected.dtype) - expected
        relative[name] = (missed.square().mean() / expected.square().mean()).sqrt().item()
    return dict(zip(relative, team.slowest(list(relative.values())), strict=True))


def limit(yardstick: dict[str, float], dtype: torch.dtype, fp8: bool = False, mixture: bool = False) -> float:
    """Return the largest error accepted, given cuBLAS + NCCL's own."""
    accepted = ALLOWED * max(yardstick.values()) + FLOOR * torch.finfo(dtype).eps
    return min(MOST_FP8, FP8 * accepted) if fp8 else min(MOST_MIXTURE if mixture else MOST, accepted)
