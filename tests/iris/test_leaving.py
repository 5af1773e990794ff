"""How a program that ends without closing its context ends the waits of its peers."""

from __future__ import annotations

import os
import re

import iris
from iris.errors import ClosedError
import pytest

from tests.harness import UNDER_TORCHRUN
from tests.processes import run_apart, run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")

# Exit functions run in reverse order, so rank 1's process lives on after it has left.
PROGRAM = """
import atexit, os, sys, time
lives_on = os.environ["RANK"] == "1"
atexit.register(lambda: lives_on and time.sleep(8))
import iris
from iris.errors import ArgumentError, PeerLostError
ctx = iris.iris(1 << 22)
waiting = {waiting}
ctx.barrier()
begin = time.monotonic()
if ctx.cur_rank == 1:
    {ending}
try:
    waiting()
except PeerLostError as error:
    print(f"{{time.monotonic() - begin:.1f}} {{error}}", flush=True)
os._exit(0)
"""
WAITING = {
    "barrier": "ctx.barrier",
    "broadcast": "lambda: ctx.hosts.all_gather(1)",
    "op": "lambda: (ctx.ccl.all_reduce(ctx.empty(4), ctx.ones(4)), ctx.barrier())",
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what != "barrier")) for what in WAITING]
)
def test_an_exception_outside_a_with_block_ends_the_peers_waits_at_once(what: str) -> None:
    ended = run_apart(2, PROGRAM.format(waiting=WAITING[what], ending="raise ValueError('mine')"), LIMIT)
    seconds, text = ended[0].stdout.split(maxsplit=1)
    assert re.search(r"lost rank 1.*\b(left its context by an exception|left by ValueError: mine)\b", text), text
    assert float(seconds) < 6, "before the process ends"
    assert ended[1].returncode == 1 and "ValueError: mine" in ended[1].stderr


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.exit(3)"])
def test_a_program_that_exits_as_it_means_to_raises_nothing_before_its_process_ends(ending: str) -> None:
    ended = run_apart(2, PROGRAM.format(waiting=WAITING["barrier"], ending=ending), LIMIT)
    seconds, text = ended[0].stdout.split(maxsplit=1)
    assert "lost rank 1" in text and "exception" not in text and float(seconds) > 6


@pytest.mark.slow
def test_a_refused_call_that_is_caught_leaves_the_peers_waiting_no_longer_than_the_time_out() -> None:
    ending = "try: ctx.ops.matmul_all_reduce(None, None, None)\n    except ArgumentError: time.sleep(40); os._exit(0)"
    ended = run_apart(2, PROGRAM.format(waiting=WAITING["barrier"], ending=ending), {"IRIS_TIMEOUT": "20"})
    seconds, text = ended[0].stdout.split(maxsplit=1)
    assert "lost rank 1" in text and 15 < float(seconds) < 35, ended


LIMIT = {"IRIS_TIMEOUT": "100"}


def forking(rank: int, world_size: int) -> list[str]:
    with iris.iris(1 << 22) as ctx:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            for call in (ctx.barrier, lambda: ctx.ones(4), ctx.take_over):
                try:
                    call()
                    os.write(writer, b"went on\n")
                except ClosedError as error:
                    os.write(writer, f"{error}\n".encode())
            ctx.close()  # alone
            os._exit(0)
        out = ctx.ones(4)
        os.waitpid(child, 0)
        ctx.ccl.all_reduce(out, out)
        ctx.barrier()
        assert out.tolist() == [world_size] * 4
        return os.read(reader, 10_000).decode().splitlines()


def test_a_fork_of_a_rank_cannot_use_its_context() -> None:
    for rank, end in enumerate(run_fresh(2, forking, env={"IRIS_TIMEOUT": "20"})):
        assert end.exitcode == 0, end.traceback
        assert len(end.result) == 3, end.result
        assert all(line.startswith(f"this process was forked from rank {rank}") for line in end.result), end.result
