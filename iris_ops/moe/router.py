"""From a router's logits to its experts: scores, top-k, weights and, for few tokens, their order, in one kernel.

torch takes a softmax, a top-k, a gather, a sum and a division, and a sort follows. Here a program holds the scores of
its tokens in registers. It takes the best expert k times: the highest score, of equal ones the lowest index. Where one
program has all tokens, it goes on to sort them by expert, as `routing.py` does, and the launch of that is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from iris.device import arch
from iris.device.function import device_function
from iris.errors import ArgumentError
import torch
import triton
import triton.language as tl

from .steps import Steps

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = "softmax", "sigmoid", "softmax of the chosen"
KINDS = (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN)
MOST_SORTED = 512  # pairs of token and expert that one program sorts
_MOST_HELD = 16384  # scores that one program holds, of 512 threads
_BLOCK, _BLOCK_SCORES = 128, 1024  # pairs sorted at once; scores of a program where there are several


@dataclass(frozen=True)
class Scoring:
    """How a router's logits become the weights of the experts that it chooses.

    `kind`: weights are a softmax of all logits, of the chosen ones alone, or the sigmoid of each. `normalised`: divided
    by the sum of the chosen ones and `epsilon`. `scale`: what they are multiplied by. With `groups`, only experts of
    the `kept_groups` best groups are chosen; a group counts as the sum of its `group_best` highest scores, 1 or 2.
    """

    kind: str = SOFTMAX
    normalised: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"scoring.kind is {self.kind!r}; expected one of {', '.join(map(repr, KINDS))}")
        if not 1 <= self.kept_groups <= self.groups or self.group_best not in (1, 2):
            raise ArgumentError(
                f"scoring keeps {self.kept_groups} of {self.groups} groups by {self.group_best} scores; expected 1 to"
                " all of them, by 1 or 2"
            )

    def refusal(self, experts: int, top_k: int) -> str | None:
        """Return why the kernel cannot choose `top_k` of `experts` so; None if it can."""
        size = experts // self.groups
        if not 1 <= top_k <= experts:
            return f"top_k is {top_k}; expected 1 to {experts}"
        if experts > _MOST_HELD:
            return f"there are {experts} experts; expected at most {_MOST_HELD}"
        if self.groups > 1 and (size * self.groups != experts or size & (size - 1) or self.groups & (self.groups - 1)):
            return f"{experts} experts are in {self.groups} groups; expected powers of two"
        if self.groups > 1 and (size < self.group_best or top_k > size * self.kept_groups):
            return (
                f"groups have {size} experts, of which {top_k} are chosen from {self.kept_groups} groups; expected more"
            )
        return None


@device_function
def _best(values, taken, e, BINS: tl.constexpr):
    """(highest of the values [T, BINS] that are not taken, where: the lowest index of equal ones)."""
    highest = tl.max(tl.where(taken != 0, float("-inf"), values), 1)
    is_best = (taken == 0) & (values == highest[:, None])
    return highest, tl.min(tl.where(is_best, e[None, :], BINS), 1)


@device_function
def _of_kept_groups(
    values, T: tl.constexpr, BINS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """`values` [T, BINS], where those of groups that are not kept are -inf."""
    SIZE: tl.constexpr = BINS // GROUPS
    grouped = tl.reshape(values, (T, GROUPS, SIZE))
    group_score = tl.max(grouped, 2)
    if BEST == 2:
        i = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == group_score[:, :, None], i, SIZE), 2)
        group_score += tl.max(tl.where(i == first[:, :, None], float("-inf"), grouped), 2)
    g = tl.arange(0, GROUPS)
    kept = tl.zeros((T, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        _, best = _best(group_score, kept, g, GROUPS)
        kept = tl.where(g[None, :] == best[:, None], 1, kept)
    grouped = tl.where((kept > 0)[:, :, None], grouped, float("-inf"))
    return tl.reshape(grouped, (T, BINS))


@device_function
def _sort_pairs(chosen, order, offsets, pairs, experts, BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """As `moe_route_kernel`, by one program: order [pairs], offsets [experts + 1]."""
    e = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for block in range(BLOCKS):
        p = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(chosen + p, mask=p < pairs, other=0).to(tl.int32)
        total += tl.histogram(expert, BINS, mask=p < pairs)
    begins = tl.cumsum(total) - total
    tl.store(offsets + e, begins, mask=e < experts)
    tl.store(offsets + experts, pairs)
    for block in range(BLOCKS):
        p = block * BLOCK + tl.arange(0, BLOCK)
        there = p < pairs
        expert = tl.load(chosen + p, mask=there, other=0).to(tl.int32)
        earlier = (expert[None, :] == expert[:, None]) & there[None, :] & (p[None, :] < p[:, None])
        tl.store(order + tl.gather(begins, expert, 0) + tl.sum(earlier.to(tl.int32), 1), p, mask=there)
        begins += tl.histogram(expert, BINS, mask=there)


@triton.jit(do_not_specialize=["tokens", "stride"])
def moe_choose_kernel(
    logits, bias, chosen, weights, order, offsets, tokens, stride, SCALE, EPSILON, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr,
    NORMALISED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """logits [tokens, EXPERTS] to chosen, weights [tokens, TOP_K], the highest score first.

    KIND: index in `KINDS`. bias [EXPERTS] is added to scores for the choice only. BLOCKS > 0: one program has all
    tokens, and sorts the pairs: order [tokens * TOP_K], offsets [EXPERTS + 1].
    """
    arch.follow()
    t, e, j = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, BINS), tl.arange(0, WIDTH)
    there = (t < tokens)[:, None] & (e < EXPERTS)[None, :]
    x = tl.load(logits + (t.to(tl.int64) * stride)[:, None] + e[None, :], mask=there, other=0.0).to(tl.float32)
    scores = x
    if KIND == 1:
        scores = 1.0 / (1.0 + tl.exp(-x))
    values = scores
    if HAS_BIAS:
        values += tl.load(bias + e, mask=e < EXPERTS, other=0.0).to(tl.float32)[None, :]
    values = tl.where(values == values, values, float("inf"))  # torch's top-k, too, takes NaN for the highest
    if GROUPS > 1:
        values = _of_kept_groups(values, T, BINS, GROUPS, KEPT, BEST)
    taken = tl.where(e[None, :] < EXPERTS, tl.zeros((T, BINS), tl.int32), 1)
    where = tl.zeros((T, WIDTH), tl.int32)
    score = tl.full((T, WIDTH), float("-inf"), tl.float32)
    for number in tl.static_range(TOP_K):
        _, best = _best(values, taken, e, BINS)
        is_best = e[None, :] == best[:, None]
        taken = tl.where(is_best, 1, taken)
        at = j[None, :] == number
        where = tl.where(at, best[:, None], where)
        score = tl.where(at, tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None], score)
    of_token = (j < TOP_K)[None, :]
    weight = tl.where(of_token, score, 0.0)
    if KIND != 1:
        among = tl.where(of_token, score, float("-inf")) if KIND == 2 else tl.where(there, x, float("-inf"))
        highest = tl.max(among, 1)
        highest = tl.where(t < tokens, highest, 0.0)
        all_of_them = tl.sum(tl.exp(among - highest[:, None]), 1)
        all_of_them = tl.where(t < tokens, all_of_them, 1.0)
        weight = tl.where(of_token, tl.exp(score - highest[:, None]) / all_of_them[:, None], 0.0)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 1) + EPSILON)[:, None]
    weight *= SCALE
    arch.lead()
    mask = (t < tokens)[:, None] & of_token
    place = (t * TOP_K)[:, None] + j[None, :]
    tl.store(chosen + place, where.to(chosen.dtype.element_ty), mask=mask)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=mask)
    if BLOCKS > 0:
        tl.debug_barrier()  # other threads of the program read what these have stored
        _sort_pairs(chosen, order, offsets, tokens * TOP_K, EXPERTS, BINS, BLOCK, BLOCKS)


def choose(
    steps: Steps, logits: torch.Tensor, bias: torch.Tensor | None, scoring: Scoring, chosen: torch.Tensor,
    weights: torch.Tensor, order: torch.Tensor | None, offsets: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Fill `chosen` and `weights` [T,k] from logits [T,E]; return whether `order` and `offsets` were filled as well.

    They are for at most `MOST_SORTED` pairs, if one program can hold the scores of all tokens.
    """
    (tokens, experts), top_k = logits.shape, chosen.shape[1]
    bins = max(32, triton.next_power_of_2(experts))
    height = max(1, triton.next_power_of_2(tokens))
    sorts = order is not None and 0 < tokens * top_k <= MOST_SORTED and height * bins <= _MOST_HELD
    if tokens == 0:
        return False
    rows = height if sorts else max(1, min(height, _BLOCK_SCORES // bins))
    blocks = triton.next_power_of_2(triton.cdiv(tokens * top_k, _BLOCK)) if sorts else 0
    args = dict(
        logits=logits, bias=bias, chosen=chosen, weights=weights, order=order if sorts else None,
        offsets=offsets if sorts else None, tokens=tokens, stride=logits.stride(0), SCALE=float(scoring.scale),
        EPSILON=float(scoring.epsilon), EXPERTS=experts, TOP_K=top_k, BINS=bins, WIDTH=triton.next_power_of_2(top_k),
        T=rows, KIND=KINDS.index(scoring.kind), NORMALISED=scoring.normalised, GROUPS=scoring.groups,
        KEPT=scoring.kept_groups, BEST=scoring.group_best, HAS_BIAS=bias is not None, BLOCK=_BLOCK, BLOCKS=blocks,
    )  # fmt: skip
    warps = max(1, min(16, rows * bins // 1024)) if sorts else 4
    steps.launch(moe_choose_kernel, (triton.cdiv(tokens, rows), 1, 1), args, num_warps=warps, num_stages=1)
    return sorts
