"""The collectives of `iris.ccl`."""

from .fault import COLLECTIVES, Fault

COLLECTIVE = [
    Fault(
        "a gather takes every part from its root",
        "iris/ccl/rooted.py",
        "takes = [(parts[rank], rank) for rank in _others(group)]",
        "takes = [(parts[dst], rank) for rank in _others(group)]",
        ("tests/iris/test_rooted.py",),
    ),
    Fault(
        "messages of one call to a rank stand in one place",
        "iris/ccl/rings.py",
        "used[each.peer] += how.slots",
        "used[each.peer] = 0",
        ("tests/iris/test_messages.py::test_many_messages_at_once[2]",),
    ),
    Fault(
        "a sender goes on without credit",
        "iris/ccl/transfer.py",
        "wanted = sent + needed - slots",
        "wanted = sent + needed - 2 * slots",
        ("tests/iris/test_transfers.py",),
    ),
    Fault(
        "a slot keeps what was taken from it",
        "iris/ccl/transfer.py",
        "    tl.store(place, SENTINEL, mask=mask)",
        "    pass",
        ("tests/iris/test_transfers.py",),
    ),
    Fault(
        "nobody tells of a unit in which the sentinel stands",
        "iris/ccl/transfer.py",
        "    if any_set((value == SENTINEL).to(tl.int32), True):\n        signal(",
        "    if lane.numel < 0:\n        signal(",
        ("tests/iris/test_transfers.py::test_any_size_at_any_address[2]",),
    ),
    Fault(
        "a unit's flag stays",
        "iris/ccl/transfer.py",
        "        tl.store(flag, 0)\n",
        "        pass\n",
        ("tests/iris/test_transfers.py::test_elements_like_the_sentinel_are_awaited",),
    ),
    Fault(
        "a reduce-scatter by flags has one half",
        "iris/ccl/flags.py",
        "parity = 0 if GATHER else epoch & 1",
        "parity = 0",
        COLLECTIVES,
    ),
    Fault(
        "a gather by flags ends before its parts are here",
        "iris/ccl/flags.py",
        "        wait_others(ctx, done + lane, LANES, epoch, WAITER)\n",
        "        pass\n",
        COLLECTIVES,
    ),
    Fault(
        "values go to the wrong peer first",
        "iris/ccl/lamport.py",
        "return item // OTHERS, (ctx.rank + 1 + item % OTHERS) % WORLD_SIZE",
        "return item // OTHERS, (ctx.rank + item % OTHERS) % WORLD_SIZE",
        COLLECTIVES,
    ),
    Fault(
        "values of all calls share a half",
        "iris/ccl/lamport.py",
        "half = staging + tl.cast(epoch & 1, tl.int64) * half_elements",
        "half = staging + tl.cast(epoch & 0, tl.int64) * half_elements",
        COLLECTIVES,
    ),
    Fault(
        "a ring rounds at each step",
        "iris/ccl/ring.py",
        'total += tl.load(staging + spot + element, mask=mask, other=0, cache_modifier=".cg")',
        'total += tl.load(staging + spot + element, mask=mask, other=0, cache_modifier=".cg")\n'
        "                        total = total.to(inp.dtype.element_ty).to(wide)",
        COLLECTIVES,
    ),
    Fault(
        "sums are left behind for the next call but one",
        "iris/ccl/accumulate.py",
        "            tl.store(place, tl.zeros((BLOCK,), staging.dtype.element_ty))\n",
        "",
        COLLECTIVES,
    ),
    Fault(
        "a part has no end of its own",
        "iris/ccl/view.py",
        "mask = (index < self.n) & (unit * BLOCK + lane < self.limit)",
        "mask = index < self.n",
        COLLECTIVES,
    ),
    Fault(
        "who owns nothing may scatter by Lamport values",
        "iris/ccl/plan.py",
        "return not problem.cols and problem.part * (problem.world_size - 1) < problem.n",
        "return not problem.cols and problem.part * (problem.world_size - 1) <= problem.n",
        COLLECTIVES,
    ),
    Fault(
        "nobody waits for a grown workspace",
        "iris/ccl/workspace.py",
        "            self.group.barrier()\n",
        "            pass\n",
        COLLECTIVES,
    ),
]
