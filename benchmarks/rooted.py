"""Collectives with a root, and messages, against torch.distributed's, which are NCCL's on GPUs.

    python -m benchmarks.rooted --ranks 2

Each is called with the same tensors, and its result, into poisoned memory, compared before and after it is timed. Sizes
are bytes of the whole tensor that a root has, that is reduced, or that a rank sends. Takes less than a minute on two
GPUs; writes rooted_<gpu>_x<ranks>.json after every row.
"""

import argparse
from collections.abc import Callable
import sys
import time

import iris
from iris.ccl import P2POp
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.cases import contenders
from benchmarks.cases.contenders import Contender
from benchmarks.measuring import report
from benchmarks.tables import every_row

OPS = ("broadcast", "gather", "scatter", "reduce", "send", "sendrecv", "batch")
NAMES = ("ctx.ccl", "torch")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.set_defaults(time_limit=60)
    parser.add_argument("--ops", type=report.some_of(OPS), default=",".join(OPS))
    parser.add_argument("--sizes", type=report.numbers, help="bytes; default: 2 KiB to 64 MiB, on CPUs 2 KiB")
    args = parser.parse_args(argv)
    if args.ranks is not None and args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: expected 2 or more, for one rank has nobody to send to")
    report.settle(args, argv, "rooted")
    args.sizes = args.sizes or ([2048 << (3 * i) for i in range(6)] if args.device == "cuda" else [2048])
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    dtype, begin = getattr(torch, args.dtype), time.monotonic()
    ctx = iris.iris(int(args.heap_gib * 2**30))
    ctx.ccl.init_p2p(max(args.sizes), torch.uint8)
    written = {**report.describe_run(team, args), "rows": [], "left_out": []}
    for nbytes in args.sizes:
        for op in args.ops:
            if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
                written["left_out"].append(f"{op} {nbytes}")
                continue
            contenders.progress(team, f"{op} {nbytes}")
            ours, theirs, exact = CASES.get(op, messages)(team, ctx, dtype, op, nbytes)
            allowed = 8 * torch.finfo(dtype).eps * team.world if op == "reduce" else 0.0
            result = contenders.timed(team, {"ctx.ccl": ours, "torch": theirs}, exact, allowed)
            written["rows"].append({"what": op, "size": f"{nbytes} bytes", **result})
            if team.rank == 0:
                report.write(written, args)
    team.say("\n" + every_row.render(report.rounded(written)))
    ctx.close()


Case = tuple[Contender, Contender, torch.Tensor | None]


def _values(team: Team, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Return every rank's tensor, [w, n], n a multiple of w."""
    n = max(1, nbytes // dtype.itemsize // team.world) * team.world
    return torch.randn(team.world, n, generator=torch.Generator().manual_seed(nbytes)).to(team.device, dtype)


def rooted(team: Team, ctx: iris.Iris, dtype: torch.dtype, op: str, nbytes: int) -> Case:
    """Return the calls to or from the last rank."""
    w, root, values = team.world, team.world - 1, _values(team, dtype, nbytes)
    n, at_root = values.shape[1], team.rank == root
    given = values[team.rank, : n // w].clone() if op == "gather" else values[team.rank].clone()
    outs = [given.new_empty(n // w if op == "scatter" else n) for _ in NAMES]
    parts = list((outs[1] if op == "gather" else given).chunk(w))

    def ours() -> None:
        if op == "broadcast":
            ctx.ccl.broadcast(outs[0].copy_(given), root)
        else:
            getattr(ctx.ccl, op)(outs[0], given, root)

    def theirs() -> None:
        if op in ("broadcast", "reduce"):
            getattr(dist, op)(outs[1].copy_(given), root)
        elif op == "gather":
            dist.gather(given, parts if at_root else None, root)
        else:
            dist.scatter(outs[1], parts if at_root else None, root)

    everywhere = {"broadcast": lambda: values[root], "scatter": lambda: values[root].view(w, -1)[team.rank]}
    there = {"gather": lambda: values[:, : n // w].reshape(-1), "reduce": lambda: values.double().sum(0)}
    exact = everywhere[op]() if op in everywhere else there[op]() if at_root else None
    return Contender(ours, outs[0]), Contender(theirs, outs[1]), exact


def messages(team: Team, ctx: iris.Iris, dtype: torch.dtype, op: str, nbytes: int) -> Case:
    """Return messages from rank 0 to rank 1; round the ring; or from each rank to all others, a part each."""
    w, rank, values = team.world, team.rank, _values(team, dtype, nbytes)
    after, before = (rank + 1) % w, (rank - 1) % w
    given, outs = values[rank].clone(), [torch.empty_like(values[rank]) for _ in NAMES]
    if op == "batch":
        exact = values.view(w, w, -1)[:, rank].reshape(-1)
    else:
        exact = values[before] if op == "sendrecv" or rank == 1 else None

    def listed(out: torch.Tensor, message: Callable, send: object, recv: object) -> list:
        parts, places = given.chunk(w), out.chunk(w)
        if op == "sendrecv":
            return [message(send, given, after), message(recv, out, before)]
        peers = [peer for peer in range(w) if peer != rank]
        sends = [message(send, parts[peer], peer) for peer in peers]
        return sends + [message(recv, places[peer], peer) for peer in peers]

    def ours() -> None:
        if op == "sendrecv":
            ctx.ccl.sendrecv(given, outs[0], after, before)
        elif op == "batch":
            outs[0].chunk(w)[rank].copy_(given.chunk(w)[rank])
            ctx.ccl.batch_isend_irecv(listed(outs[0], P2POp, "send", "recv"))
        elif rank < 2:
            ctx.ccl.send(given, 1) if rank == 0 else ctx.ccl.recv(outs[0], 0)

    def theirs() -> None:
        if op != "send":
            if op == "batch":
                outs[1].chunk(w)[rank].copy_(given.chunk(w)[rank])
            for work in dist.batch_isend_irecv(listed(outs[1], dist.P2POp, dist.isend, dist.irecv)):
                work.wait()
        elif rank < 2:
            dist.send(given, 1) if rank == 0 else dist.recv(outs[1], 0)

    return Contender(ours, outs[0]), Contender(theirs, outs[1]), exact


CASES = dict.fromkeys(("broadcast", "gather", "scatter", "reduce"), rooted)


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 120))


if __name__ == "__main__":
    main()
