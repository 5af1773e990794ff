"""The collectives of `ctx.ccl` beside NCCL and torch's symmetric memory: `python -m benchmarks.ccl --ranks 4`.

Sizes are what nccl-tests counts: bytes of the input of all_reduce, reduce_scatter and all_to_all, of the output of
all_gather; so bytes on the link are 2 (w - 1) / w of them for all_reduce and (w - 1) / w for the others.

Every contender of a row is checked, poisoned output first, before it is timed, and graphs once more by a replay. One
that raises or is wrong is named and not timed. Prints the tables of `ccl_report.py` and writes ccl_<gpu>_x<ranks>.json
after every row. `--sweep` times our variants instead, over programs and blocks, and what the plan would have taken.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
import functools
import math
import sys
import time

import torch
import torch.distributed as dist

from benchmarks import ccl_report, report, timing
from benchmarks.launch import Team, launch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KIB, MIB = 1 << 10, 1 << 20
SIZES = [2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK = [2 * KIB, 64 * KIB, MIB, 16 * MIB]
SWEEP = [2 * KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
TINY = [2 * KIB, 16 * KIB]
PROGRAMS = (8, 16, 32, 64, 132)
BLOCKS = {"words": (256, 512, 1024, 2048), "flags": (2048, 8192, 16384)}
COPIES = 2  # of the inputs, so that a stale result is seen
ONE_SHOT_LIMIT = 16 * MIB  # beyond it nobody would send everything to everyone
BUDGET = timing.Budget(batch_ms=1.0, longest_ms=8.0, measure_ms=25.0, calls=(4, 40), repeats=(4, 15))
BRIEF = timing.Budget(batch_ms=0.5, longest_ms=4.0, measure_ms=4.0, calls=(4, 20), repeats=(2, 3))

Call = Callable[[int], torch.Tensor]


@dataclass(eq=False)
class Case:
    """One row on one rank: inputs, and what every rank must get."""

    op: str
    nbytes: int
    team: Team
    dtype: torch.dtype
    inputs: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        w = self.team.world
        n = -(-self.nbytes // (self.dtype.itemsize * w * w)) * w * w
        self.shape, self.out_shape = {
            "all_reduce": ((n,), (n,)),
            "all_gather": ((n // w,), (n,)),
            "reduce_scatter": ((w, n // w), (1, n // w)),
            "all_to_all": ((1, n), (1, n)),
        }[self.op]
        generator = torch.Generator(self.team.device).manual_seed(self.nbytes % 65521 * 64 + self.team.rank)
        draw = functools.partial(torch.randn, generator=generator, device=self.team.device, dtype=self.dtype)
        self.inputs = [draw(self.shape) for _ in range(COPIES)]

    @property
    def bus_bytes(self) -> float:
        w = self.team.world
        return self.nbytes * (w - 1) / w * (2 if self.op == "all_reduce" else 1)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.out_shape, dtype=self.dtype, device=self.team.device)

    @functools.cache  # noqa: B019  a case is short-lived
    def expected(self, copy: int) -> torch.Tensor:
        """By torch.distributed; sums in float32."""
        reduces = self.op in ("all_reduce", "reduce_scatter")
        given = self.inputs[copy].float() if reduces else self.inputs[copy]
        out = torch.empty(self.out_shape, dtype=given.dtype, device=given.device)
        if self.op == "all_reduce":
            out.copy_(given)
            dist.all_reduce(out)
        elif self.op == "all_gather":
            dist.all_gather_into_tensor(out, given)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_tensor(out, given)
        else:
            parts = list(out.view(self.team.world, -1).unbind())
            sent = list(given.reshape(self.team.world, -1).unbind())
            if self.team.cuda:
                dist.all_to_all(parts, sent)
            else:  # gloo has none
                everything = [torch.empty_like(given) for _ in range(self.team.world)]
                dist.all_gather(everything, given)
                mine = torch.cat(everything).view(self.team.world, self.team.world, -1)[:, self.team.rank]
                out.view(self.team.world, -1).copy_(mine)
        return out

    def error(self, out: torch.Tensor, copy: int) -> float:
        """1 is the limit: for sums, of rounding at every one of them; for copies, bits."""
        expected = self.expected(copy)
        if self.op in ("all_gather", "all_to_all"):
            return 0.0 if torch.equal(out.view_as(expected), expected) else math.inf
        difference = (out.view_as(expected).float() - expected).abs()
        scale = expected.square().mean().sqrt()
        eps = torch.finfo(self.dtype).eps
        in_norm = difference.square().mean().sqrt() / scale / eps
        worst = torch.maximum(in_norm, difference.max() / scale / (8 * eps)).item()
        return worst if math.isfinite(worst) else math.inf

    def poison(self, out: torch.Tensor) -> None:
        """NaN everywhere, and no rank goes on before all have done so."""
        out.fill_(float("nan"))
        self.team.synchronize()
        self.team.barrier()
        self.team.synchronize()

    def check(self, contender: "Contender", call: Call) -> float:
        worst = 0.0
        for copy in (0, COPIES - 1):
            if not contender.in_place:
                self.poison(call(copy))  # the first call also compiles and allocates
            worst = max(worst, self.error(call(copy), copy))
        return worst


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # "ours" or "rival"
    prepare: Callable[[Case], tuple[Call, Call]]  # the call that is checked, and the one that is timed
    serves: Callable[[Case], bool]
    in_place: bool = False  # what it returns was its input: poison would be summed
    plan: Callable[[Case], dict] | None = None


class Ours:
    """A context, and one output on its heap that all rows share."""

    def __init__(self, team: Team, nbytes: int, heap_gib: float, dtype: torch.dtype) -> None:
        import iris

        self.ctx = iris.iris(int(heap_gib * 2**30))
        self.buffer = self.ctx.empty(nbytes // dtype.itemsize + team.world**2, dtype=dtype)

    def out(self, case: Case) -> torch.Tensor:
        return self.buffer[: math.prod(case.out_shape)].view(case.out_shape)

    def call(self, case: Case, config=None) -> Call:
        out, op = self.out(case), getattr(self.ctx.ccl, case.op)

        def call(i: int) -> torch.Tensor:
            op(out, case.inputs[i], config=config)
            return out

        return call

    def contender(self) -> Contender:
        def prepare(case: Case) -> tuple[Call, Call]:
            call = self.call(case)
            return call, call

        return Contender("ours", "ours", prepare, lambda case: True, plan=self.plan)

    def plan(self, case: Case, config=None) -> dict:
        return asdict(self.ctx.ccl.plan(case.op, self.out(case), case.inputs[0], config))


def torch_distributed(team: Team) -> Contender:
    def prepare(case: Case) -> tuple[Call, Call]:
        out, w = case.empty(), team.world

        def all_reduce(i: int) -> torch.Tensor:
            out.copy_(case.inputs[i])
            dist.all_reduce(out)
            return out

        def all_reduce_again(i: int) -> torch.Tensor:
            # there is no call but in place; the mean of means keeps the numbers finite, at the same cost
            dist.all_reduce(out, op=dist.ReduceOp.AVG if team.cuda else dist.ReduceOp.SUM)
            return out

        def gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(out, case.inputs[i])
            return out

        def scatter(i: int) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, case.inputs[i])
            return out

        def exchange(i: int) -> torch.Tensor:
            dist.all_to_all_single(out.view(w, -1), case.inputs[i].view(w, -1))
            return out

        if case.op == "all_reduce":
            return all_reduce, all_reduce_again
        call = {"all_gather": gather, "reduce_scatter": scatter, "all_to_all": exchange}[case.op]
        return call, call

    def serves(case: Case) -> bool:
        return team.cuda or case.op != "all_to_all"

    return Contender("NCCL" if team.cuda else "gloo", "rival", prepare, serves, in_place=True)


def symmetric_memory(team: Team, nbytes: int, dtype: torch.dtype) -> list[Contender]:
    """Torch's one-shot and two-shot. Their input has to lie in symmetric memory; copying it there is not counted."""
    import torch.distributed._symmetric_memory as symm_mem

    @functools.cache
    def memory() -> torch.Tensor:
        found = symm_mem.empty(nbytes // dtype.itemsize + team.world**2, dtype=dtype, device=team.device)
        symm_mem.rendezvous(found, dist.group.WORLD.group_name)
        return found

    group = dist.group.WORLD.group_name

    def one_shot(case: Case) -> tuple[Call, Call]:
        shared, out = memory()[: math.prod(case.shape)], case.empty()

        def timed(i: int) -> torch.Tensor:
            return torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out)

        def checked(i: int) -> torch.Tensor:
            case.team.barrier()
            shared.copy_(case.inputs[i])
            return timed(i)

        return checked, timed

    def two_shot(case: Case) -> tuple[Call, Call]:
        shared = memory()[: math.prod(case.shape)]

        def timed(i: int) -> torch.Tensor:
            return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

        def checked(i: int) -> torch.Tensor:
            case.team.barrier()
            shared.copy_(case.inputs[i])
            return timed(i)

        return checked, timed

    def reduces(case: Case) -> bool:
        return case.op == "all_reduce" and dtype in (torch.bfloat16, torch.float32)

    def small(case: Case) -> bool:
        return reduces(case) and case.nbytes <= ONE_SHOT_LIMIT

    return [
        Contender("torch one-shot", "rival", one_shot, small, in_place=True),
        Contender("torch two-shot", "rival", two_shot, reduces, in_place=True),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.set_defaults(time_limit=None)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", help="bytes, as 2048,1048576; default: 2 KiB to 256 MiB, on CPUs tiny ones")
    parser.add_argument("--modes", default="graph,eager")
    parser.add_argument("--quick", action="store_true", help="four sizes")
    parser.add_argument("--sweep", action="store_true", help="our variants x programs x blocks instead of the rivals")
    args = parser.parse_args(argv)
    report.settle(args, argv, "ccl_sweep" if args.sweep else "ccl")
    args.time_limit = args.time_limit or (90 if args.sweep else 45)
    args.command = args.command.replace("benchmarks.ccl_sweep", "benchmarks.ccl")
    gpu = args.device == "cuda"
    sizes = SWEEP if args.sweep else QUICK if args.quick else SIZES
    args.sizes = [int(size) for size in args.sizes.split(",")] if args.sizes else sizes if gpu else TINY
    args.modes = [mode for mode in args.modes.split(",") if gpu or mode == "eager"]
    args.ops = args.ops.split(",")
    if unknown := set(args.ops) - set(OPS):
        parser.error(f"--ops: {', '.join(sorted(unknown))}; expected some of {', '.join(OPS)}")
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    ours = Ours(team, max(args.sizes), args.heap_gib, dtype)
    found = [ours.contender()]
    if not args.sweep:
        found.append(torch_distributed(team))
        if team.cuda:
            found += symmetric_memory(team, max(args.sizes), dtype)
    measured = {**report.describe_run(team, args), "rows": []}
    begin = time.monotonic()
    # sizes outermost: a run that is cut short has every op
    for nbytes in args.sizes:
        for op in args.ops:
            elapsed = team.slowest([time.monotonic() - begin])[0]
            if elapsed > args.time_limit:
                measured.setdefault("left_out", []).append(f"{op} {nbytes}")
                continue
            case = Case(op, nbytes, team, dtype)
            row = {"op": op, "bytes": nbytes, "bus_bytes": case.bus_bytes, "results": []}
            if args.sweep:
                sweep(case, ours, row)
            else:
                measure(case, found, row, args)
            measured["rows"].append(row)
            shown = " | ".join(f"{r['name']} {report.summary(r)}" for r in row["results"][:8])
            team.say(f"[{elapsed:4.0f} s] {op} {ccl_report.size_name(nbytes)}: {shown}")
            if team.rank == 0:
                report.write(measured, args)
    team.say("\n" + ccl_report.render(report.rounded(measured)))
    team.synchronize()
    ours.ctx.close()


def measure(case: Case, found: list[Contender], row: dict, args: argparse.Namespace) -> None:
    team, calls, results, estimates = case.team, {}, {}, {}
    for contender in found:
        if not contender.serves(case):
            continue
        result = {"name": contender.name, "kind": contender.kind, "status": "ok", "notes": []}
        results[contender.name] = result
        row["results"].append(result)
        pair, reason = team.attempt(lambda contender=contender: contender.prepare(case))
        if not reason:
            error, reason = team.attempt(lambda contender=contender, pair=pair: case.check(contender, pair[0]))
        if not reason:
            worst = team.slowest([error])[0]
            reason = f"wrong result: {worst:.3g} times the allowed error" if worst > 1 else None
        if not reason:
            estimate, reason = team.attempt(lambda pair=pair: timing.estimate_us(team, pair[1], COPIES))
        if reason:
            result.update(status="WRONG" if reason.startswith("wrong") else "n/a")
            result["notes"].append(reason)
            continue
        estimates[contender.name] = team.slowest([estimate])[0]
        calls[contender.name] = pair[1]
        if contender.plan:
            result["plan"] = contender.plan(case)
    budget = BUDGET if team.cuda else timing.INTERPRETED
    if not calls:
        return
    for mode in sorted(args.modes):  # eager first: a capture that fails may leave a rival unusable
        batches, outputs = {}, {}
        for name, call in calls.items():
            count = budget.calls_for(estimates[name], COPIES)
            if mode == "eager":
                batches[name] = timing.eager_batch(call, count, COPIES)
                continue
            captured, reason = team.attempt(lambda call=call, count=count: timing.graph_batch(call, count, COPIES))
            if reason:
                results[name]["notes"].append(f"no CUDA graph ({reason})")
            else:
                batches[name], outputs[name] = captured
        round_us = sum(estimates[name] * batch.calls for name, batch in batches.items())
        timings, failed = timing.interleave(team, batches, budget.repeats_for(round_us, len(batches)))
        for name, reason in failed.items():
            results[name]["notes"].append(f"failed while timed, {mode} ({reason})")
        for name, taken in timings.items():
            if name == "ours" and name in outputs and not _replay_is_right(case, batches[name], outputs[name]):
                results[name].update(status="WRONG")
                results[name]["notes"].append("wrong result of a replay")
                continue
            results[name][f"{mode}_us"] = taken.call_us
            results[name][f"{mode}_host_us"] = taken.host_us


def _replay_is_right(case: Case, batch: timing.Batch, out: torch.Tensor) -> bool:
    def replay() -> float:
        case.poison(out)
        batch.run()
        return case.error(out, COPIES - 1)

    error, reason = case.team.attempt(replay)
    return not reason and case.team.slowest([error])[0] <= 1


def sweep(case: Case, ours: Ours, row: dict) -> None:
    """Every variant of ours with every number of programs and every block, as graphs; each checked."""
    from iris.ccl import Config

    team = case.team
    variants = [("two_shot", "words"), ("two_shot", "flags")]
    if case.op == "all_reduce":
        variants.insert(0, ("one_shot", "words"))
    configs = {"as planned": None}
    for variant, protocol in variants:
        if (protocol == "words" and case.nbytes > 64 * MIB) or (variant == "one_shot" and case.nbytes > MIB):
            continue
        for block in BLOCKS[protocol] if team.cuda else (2048,):
            for programs in PROGRAMS if team.cuda else (1,):
                reduce = dict(all_reduce_variant=variant) if case.op == "all_reduce" else {}
                config = Config(1, block, comm_sms=programs, protocol=protocol, **reduce)
                configs[f"{variant} {protocol} {programs} x {block}"] = config
    known = set()
    for name, config in configs.items():
        plan = ours.plan(case, config)
        launched = tuple(plan[key] for key in ("variant", "protocol", "block", "programs"))
        if config is not None and (launched in known or plan["programs"] < config.comm_sms // 2):
            continue  # fewer units than programs: measured with fewer already
        known.add(launched)
        result = {"name": name, "kind": "ours", "status": "ok", "notes": [], "plan": plan}
        row["results"].append(result)
        call = ours.call(case, config)
        contender = Contender(name, "ours", lambda case: None, lambda case: True)
        error, reason = team.attempt(lambda contender=contender, call=call: case.check(contender, call))
        if reason or team.slowest([error])[0] > 1:
            result.update(status="WRONG", notes=[reason or f"{error:.3g} times the allowed error"])
            continue
        estimate = team.slowest([timing.estimate_us(team, call, COPIES)])[0]
        budget = BRIEF if team.cuda else timing.INTERPRETED
        count = budget.calls_for(estimate, COPIES)
        if team.cuda:
            captured, reason = team.attempt(lambda call=call, count=count: timing.graph_batch(call, count, COPIES))
            if reason:
                result.update(status="n/a", notes=[reason])
                continue
            batch = captured[0]
        else:
            batch = timing.eager_batch(call, count, COPIES)
        taken, _ = timing.interleave(team, {name: batch}, budget.repeats_for(estimate * count, 1))
        if name in taken:
            result["graph_us" if team.cuda else "eager_us"] = taken[name].call_us


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
