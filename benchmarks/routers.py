"""Routers of mixtures: `moe_choose` beside torch's softmax, top-k and norm with a sort. `python -m benchmarks.routers`.

Each row is a model's router and a number of tokens, in bf16. All contenders begin at the logits and end with experts,
weights and, from four pairs an expert on, the tokens by expert. Results are compared with float64 before and after they
are timed, as CUDA graphs. Writes routers_<gpu>_x1.json after every row. Takes less than a minute.

    ours            `moe_choose`: one kernel, or two where tokens are many
    apart           the same without the sort, and `moe_route` after it
    torch           the router's own code in transformers, and `moe_route`
    torch, no sort  that without the sort
"""

import argparse
from collections.abc import Callable
import sys
import time

import iris
from iris_ops import Scoring
from iris_ops.moe.scoring import SIGMOID, SOFTMAX_OF_CHOSEN
from iris_ops.planning.moe_ways import need_sorting
from iris_tp.bench.team import Team, launch
from layers.hf.routers import by_torch
import torch

from benchmarks.cases import contenders
from benchmarks.cases.contenders import Contender
from benchmarks.measuring import report
from benchmarks.tables import every_row

ROUTERS = {
    "Qwen3-30B-A3B": (128, 8, Scoring()),
    "gpt-oss-20b": (32, 4, Scoring(SOFTMAX_OF_CHOSEN, normalised=False)),
    "Mixtral-8x7B": (8, 2, Scoring()),
    "DeepSeek-V3": (256, 8, Scoring(SIGMOID, True, 1e-20, 2.5, 8, 4)),
}
TOKENS = (1, 8, 16, 64, 256, 2048)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--tokens", type=report.numbers, default=list(TOKENS), help="as 1,16,64")
    parser.set_defaults(ranks=1, time_limit=60)
    args = parser.parse_args(argv)
    report.settle(args, argv, "routers")
    if args.ranks != 1:
        parser.error(f"--ranks {args.ranks}: expected 1, for a router exchanges nothing")
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    ctx, begin = iris.iris(1 << 24), time.monotonic()
    written = {**report.describe_run(team, args), "rows": [], "left_out": []}
    for name, (experts, top_k, scoring) in ROUTERS.items():
        for tokens in args.tokens:
            label = f"{name}, {tokens}"
            if time.monotonic() - begin > args.time_limit:
                written["left_out"].append(label)
                continue
            contenders.progress(team, label)
            row = measured(team, ctx, tokens, experts, top_k, scoring, getattr(torch, args.dtype))
            written["rows"].append({"what": "router", "size": label, **row})
            report.write(written, args)
    team.say("\n" + every_row.render(report.rounded(written)))
    ctx.close()


def measured(
    team: Team, ctx: iris.Iris, tokens: int, experts: int, top_k: int, scoring: Scoring, dtype: torch.dtype
) -> dict:  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator).to(ctx.device, dtype)
    bias = torch.randn(experts, generator=generator).to(ctx.device) / 8 if scoring.kind == SIGMOID else None
    chosen, weights = by_torch(logits, top_k, scoring, bias)
    exact = dense(chosen, weights.double(), experts)
    sort, names = need_sorting(tokens * top_k, experts), ("ours", "apart", "torch", "torch, no sort")
    results = {name: torch.zeros_like(exact, dtype=torch.float32) for name in names}
    last: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def ours(name: str, in_one: bool) -> Callable[[], None]:
        def call() -> None:
            routing, routing_weights = ctx.ops.moe_choose(logits, top_k, scoring, bias, dtype, sort and in_one)
            if sort and not in_one:
                ctx.ops.moe_route(routing.chosen, experts)
            last[name] = routing.chosen, routing_weights

        return call

    def torchs(name: str, sorts: bool) -> Callable[[], None]:
        def call() -> None:
            best, routing_weights = by_transformers(logits, top_k, scoring, bias)
            if sort and sorts:
                ctx.ops.moe_route(best, experts)
            last[name] = best, routing_weights.to(dtype)

        return call

    calls = {
        "ours": ours("ours", True),
        "apart": ours("apart", False),
        "torch": torchs("torch", True),
        "torch, no sort": torchs("torch, no sort", False),
    }
    if not sort:
        del calls["apart"], calls["torch, no sort"]
    # what a graph leaves are tensors of its own, which are compared by expert
    entries = {
        name: Contender(call, results[name], lambda _, name=name: dense(*last[name], experts))
        for name, call in calls.items()
    }
    return contenders.timed(team, entries, exact, (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps)


def dense(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return weights [T, E] by expert, 0 where one is not chosen."""
    return torch.zeros(len(chosen), experts, dtype=weights.dtype, device=weights.device).scatter(1, chosen, weights)


def by_transformers(
    logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts, weights) as routers of transformers compute them: without sorts of all experts."""
    if scoring.kind == SOFTMAX_OF_CHOSEN:
        best, experts = torch.topk(logits, top_k, dim=-1)
        return experts, torch.softmax(best, dim=1, dtype=best.dtype)
    x = logits.float()
    scores = x.sigmoid() if scoring.kind == SIGMOID else torch.softmax(x, dim=-1)
    values = scores if bias is None else scores + bias
    if scoring.groups > 1:
        grouped = values.view(len(x), scoring.groups, -1)
        kept = grouped.topk(scoring.group_best, dim=-1)[0].sum(-1).topk(scoring.kept_groups, dim=-1, sorted=False)[1]
        mask = torch.zeros(grouped.shape[:2], device=x.device).scatter_(1, kept, 1).unsqueeze(-1)
        values = values.masked_fill(~mask.expand(grouped.shape).reshape(values.shape).bool(), float("-inf"))
    experts = values.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, experts)
    if scoring.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + scoring.epsilon)
    return experts, weights * scoring.scale


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 60))


if __name__ == "__main__":
    main()
