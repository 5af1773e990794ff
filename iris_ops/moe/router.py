"""From a router's logits to its experts: scores, top-k, weights and, for few tokens, their order, in one kernel.

torch takes a softmax, a top-k, a gather, a sum and a division, and a sort follows. Here a program holds the scores of
its tokens in registers. It takes the best expert k times: the highest score, of equal ones the lowest index. Where one
program has all tokens, it goes on to sort them by expert, as `routing.py` does, and the launch of that is saved.
"""

from __future__ import annotations

from functools import cache

from iris.device import arch
from iris.device.function import device_function
from iris.errors import ArgumentError, DtypeError, ShapeError
import torch
import triton
import triton.language as tl

from ..checks import check_kind
from ..planning.experts import MOST_CHOSEN, MOST_EXPERTS
from ..problem import DTYPES
from ..steps import Run
from .arguments import ScoringForm
from .routing import Routing
from .scoring import KINDS, Scoring

CHOOSE = "moe_choose"
OPEN = tl.constexpr(-1)  # the rank of what is not chosen
MOST_SORTED = 128  # pairs of token and expert that one program sorts; 512 took four times as long as a second kernel
_LEAST_BINS = 32  # of a histogram
_MOST_HELD = 16384  # scores that one program holds, of 512 threads
_BLOCK_SCORES = 512  # of a program where there are several


@device_function
def _best(values, rank, e, BINS: tl.constexpr):
    """Return where the highest value of each row [T, BINS] is, of those without a rank: the lowest index of equal
    ones."""
    highest = tl.max(tl.where(rank == OPEN, values, float("-inf")), 1)
    is_best = (rank == OPEN) & (values == highest[:, None])
    return tl.min(tl.where(is_best, e[None, :], BINS), 1)


@device_function
def _of_kept_groups(
    values, T: tl.constexpr, BINS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """Return `values` [T, BINS] with -inf in the groups that are not kept."""
    SIZE: tl.constexpr = BINS // GROUPS
    grouped = tl.reshape(values, (T, GROUPS, SIZE))
    group_score = tl.max(grouped, 2)
    if BEST == 2:
        i = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == group_score[:, :, None], i, SIZE), 2)
        group_score += tl.max(tl.where(i == first[:, :, None], float("-inf"), grouped), 2)
    g = tl.arange(0, GROUPS)
    rank = tl.full((T, GROUPS), OPEN, tl.int32)
    for number in tl.static_range(KEPT):
        rank = tl.where(g[None, :] == _best(group_score, rank, g, GROUPS)[:, None], number, rank)
    grouped = tl.where((rank != OPEN)[:, :, None], grouped, float("-inf"))
    return tl.reshape(grouped, (T, BINS))


@device_function
def _sort_pairs(chosen, order, offsets, pairs, experts, BINS: tl.constexpr, MOST: tl.constexpr):
    """Sort up to MOST pairs as `moe_route_kernel` does, in one program: order [pairs], offsets [experts + 1]."""
    e, p = tl.arange(0, BINS), tl.arange(0, MOST)
    there = p < pairs
    expert = tl.load(chosen + p, mask=there, other=0).to(tl.int32)
    total = tl.histogram(expert, BINS, mask=there)
    begins = tl.cumsum(total) - total
    tl.store(offsets + e, begins, mask=e < experts)
    tl.store(offsets + experts, pairs)
    earlier = (expert[None, :] == expert[:, None]) & there[None, :] & (p[None, :] < p[:, None])
    tl.store(order + tl.gather(begins, expert, 0) + tl.sum(earlier.to(tl.int32), 1), p, mask=there)


@triton.jit(do_not_specialize=["tokens", "stride"])
def moe_choose_kernel(
    logits, bias, chosen, weights, order, offsets, tokens, stride, SCALE, EPSILON, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, BINS: tl.constexpr, T: tl.constexpr, form: tl.constexpr, HAS_BIAS: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """Choose experts by logits [tokens, EXPERTS]: chosen and weights [tokens, TOP_K], the highest score first.

    form: a `ScoringForm`. bias [EXPERTS] is added to scores for the choice only. SORTED: 0, or one program has all
    tokens, and sorts up to so many pairs: order [tokens * TOP_K], offsets [EXPERTS + 1].
    """
    arch.follow()
    KIND: tl.constexpr = form.KIND
    t, e = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, BINS)
    known = (e < EXPERTS)[None, :]
    there = (t < tokens)[:, None] & known
    x = tl.load(logits + (t.to(tl.int64) * stride)[:, None] + e[None, :], mask=there, other=0.0).to(tl.float32)
    scores = x
    if KIND == 1:
        scores = 1.0 / (1.0 + tl.exp(-x))
    values = scores
    if HAS_BIAS:
        values += tl.load(bias + e, mask=e < EXPERTS, other=0.0).to(tl.float32)[None, :]
    values = tl.where(values == values, values, float("inf"))  # torch's top-k, too, takes NaN for the highest
    if form.GROUPS > 1:
        values = _of_kept_groups(values, T, BINS, form.GROUPS, form.KEPT, form.BEST)
    # all results stay where the scores are, by expert: what a row chooses is found by its rank, and moves in the store
    rank = tl.where(known, tl.full((T, BINS), OPEN, tl.int32), OPEN - 1)
    for number in tl.static_range(TOP_K):
        rank = tl.where(e[None, :] == _best(values, rank, e, BINS)[:, None], number, rank)
    is_chosen = rank >= 0
    weight = scores
    if KIND != 1:
        among = tl.where(is_chosen if KIND == 2 else known, x, float("-inf"))
        weight = tl.exp(among - tl.max(among, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
    if form.NORMALISED:
        weight = weight / (tl.sum(tl.where(is_chosen, weight, 0.0), 1) + EPSILON)[:, None]
    weight *= SCALE
    arch.lead()
    mask, place = is_chosen & (t < tokens)[:, None], (t * TOP_K)[:, None] + rank
    tl.store(chosen + place, (e[None, :] + tl.zeros((T, BINS), tl.int32)).to(chosen.dtype.element_ty), mask=mask)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=mask)
    if SORTED > 0:
        tl.debug_barrier()  # other threads of the program read what these have stored
        _sort_pairs(chosen, order, offsets, tokens * TOP_K, EXPERTS, BINS, SORTED)


def _check(
    logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Raise a typed error for arguments of `moe_choose` that the kernel cannot take."""
    check_kind(CHOOSE, "logits", logits, device)
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MOST_EXPERTS or logits.shape[0] >= 1 << 24:
        raise ShapeError(f"{CHOOSE}: logits is {tuple(logits.shape)}; expected (T,E), E from 1 to {MOST_EXPERTS}")
    if logits.dtype not in DTYPES:
        raise DtypeError(f"{CHOOSE}: logits has dtype {logits.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ArgumentError(f"{CHOOSE}: logits has strides {logits.stride()}; expected contiguous rows")
    if dtype not in DTYPES:
        raise DtypeError(f"{CHOOSE}: dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if type(scoring) is not Scoring:
        raise ArgumentError(f"{CHOOSE}: scoring is {scoring!r}; expected an iris_ops.Scoring")
    if type(top_k) is not int or not 1 <= top_k <= min(MOST_CHOSEN, logits.shape[1]):
        most = min(MOST_CHOSEN, logits.shape[1])
        raise ArgumentError(f"{CHOOSE}: top_k is {top_k!r}; expected an integer from 1 to {most}")
    if reason := scoring.refusal(logits.shape[1], top_k):
        raise ArgumentError(f"{CHOOSE}: {reason}")
    if bias is not None:
        check_kind(CHOOSE, "bias", bias, device)
        if tuple(bias.shape) != (logits.shape[1],) or not bias.is_contiguous():
            raise ShapeError(f"{CHOOSE}: bias is {tuple(bias.shape)}; expected ({logits.shape[1]},), contiguous")
        if bias.dtype not in DTYPES:
            raise DtypeError(f"{CHOOSE}: bias has dtype {bias.dtype}; expected one of {', '.join(map(str, DTYPES))}")


@cache
def _form_of(scoring: Scoring) -> ScoringForm:
    """Return the constants of `scoring`."""
    kind = KINDS.index(scoring.kind)
    return ScoringForm(kind, scoring.normalised, scoring.groups, scoring.kept_groups, scoring.group_best)


def choose(
    run: Run, logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None, dtype: torch.dtype,
    sort: bool,
) -> tuple[Routing, torch.Tensor]:  # fmt: skip
    """Run `ctx.ops.moe_choose`: return new tensors, filled on the device.

    One kernel sorts, too, at most `MOST_SORTED` pairs, if one program can hold the scores of all tokens. Where a row's
    bits are promised each program holds as many tokens whatever T is, so that sums over experts have one order.
    """
    device, full_programs = run.rank.device, run.rank.level.rows_alike
    _check(logits, top_k, scoring, bias, dtype, device)
    tokens, experts = logits.shape
    routed = Routing.of(torch.empty(tokens, top_k, dtype=torch.int64, device=device), experts)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=device)
    bins = experts if scoring.groups > 1 else max(_LEAST_BINS, triton.next_power_of_2(experts))
    height, several = triton.next_power_of_2(tokens), max(1, _BLOCK_SCORES // bins)
    sorts = sort and not full_programs and bins >= _LEAST_BINS and height * bins <= _MOST_HELD
    sorts = sorts and 0 < tokens * top_k <= MOST_SORTED
    rows = height if sorts else several if full_programs else min(height, several)
    args = dict(
        logits=logits, bias=bias, chosen=routed.chosen, weights=weights, order=routed.rows if sorts else None,
        offsets=routed.offsets if sorts else None, tokens=tokens, stride=logits.stride(0), SCALE=float(scoring.scale),
        EPSILON=float(scoring.epsilon), EXPERTS=experts, TOP_K=top_k, BINS=bins, T=rows, form=_form_of(scoring),
        HAS_BIAS=bias is not None, SORTED=MOST_SORTED if sorts else 0,
    )  # fmt: skip
    # one warp where several programs work: its threads reduce a row without waiting for others
    warps = max(1, min(16, rows * bins // 1024))
    if tokens:
        run.launch(moe_choose_kernel, (triton.cdiv(tokens, rows), 1, 1), args, num_warps=warps, num_stages=1)
    if sort and not sorts:
        routed.sort(run)
    return routed, weights
