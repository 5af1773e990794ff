"""Forty wrong lines in what synchronises ranks: signals, waits, epochs, orders and double buffers.

A fault names a function and a pattern: an expression of it, in which `f(...)` is any call of `f`. Formatting, comments
and all other code of the function may change.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `function` of `file`, `new` stands where `old` should; `tests`, files or tests of files, should fail then.

    `kernels`: a regular expression of the compiled kernels at which the tests look.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]
    kernels: str = ""

    def planted(self, source: str) -> str:
        """The source of `file` with the fault. Raises `LookupError` where the pattern is not there."""
        tree = ast.parse(source)
        replacing = _Replacing(ast.parse(self.old, mode="eval").body, ast.parse(self.new, mode="eval").body)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == self.function:
                replacing.generic_visit(node)
        if not replacing.found:
            raise LookupError(f"{self.name}: {self.old} is not in {self.function} of {self.file}")
        return ast.unparse(ast.fix_missing_locations(tree))


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new, self.found = old, new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if _alike(node, self.old):
            self.found += 1
            return self.new
        return self.generic_visit(node)


def _alike(node: object, pattern: object) -> bool:
    if type(node) is not type(pattern):
        return False
    if isinstance(node, list):
        return len(node) == len(pattern) and all(map(_alike, node, pattern))
    if not isinstance(node, ast.AST):
        return node == pattern
    if isinstance(node, ast.Call) and [ast.unparse(each) for each in pattern.args] == ["..."]:
        return _alike(node.func, pattern.func)
    return all(
        _alike(getattr(node, name), getattr(pattern, name)) for name in node._fields if name not in ("ctx", "kind")
    )


OPS = ("tests/iris_ops/test_ops.py",)
EPOCHS = ("tests/iris_ops/test_epoch.py",)
BOTH = (*EPOCHS, *OPS)
ORDER = ("tests/iris_ops/test_order.py",)
COLLECTIVES = ("tests/iris/test_ccl.py", "tests/iris/test_ccl_calls.py")
LAMPORT = ("tests/iris_ops/test_lamport_matmul.py", *BOTH)
EXCHANGE = ("tests/iris/test_lamport.py", *LAMPORT)
LOST = ("tests/iris/test_lost_ranks.py", "tests/iris/test_failures.py", "tests/iris/test_ccl_calls.py")
OUTPUTS = ("tests/iris_ops/test_outputs.py",)
TRANSFERS = ("tests/iris/test_transfers.py",)
TILES = ("tests/iris/test_tiles.py",)
ACQUIRES = ("tests/test_codegen_ptx.py::test_ptx_acquires_at_every_look_at_a_flag[sm_90]",)
SIGNALS = ("tests/test_codegen_ptx.py::test_ptx_has_signals_and_waits[sm_90]",)
LOOKS = "^(ccl_spinlock|lamport_gather_first|reduce_scatter_tma)$"
SENDS = "^(rma_put_and_signal|reduce_scatter_tma|all_reduce_tma|matmul_all_gather_tma|all_gather_matmul_rows_tma)$"
SYNC, LAMPORT_VALUES, PLACES = "iris/device/sync.py", "iris/device/lamport.py", "iris/device/places.py"
TRANSFER, FLAGS = "iris/ccl/transfer.py", "iris/ccl/flags.py"
GATHER_FIRST, FEW = "iris_ops/kernels/gather_matmul.py", "iris_ops/kernels/lamport_matmul.py"
SUMS, TURNS = "iris_ops/kernels/matmul_reduce.py", "iris_ops/kernels/tile_orders.py"

FAULTS = [
    # --- signals and waits --------------------------------------------------------------------------------------------
    Fault("a signal releases nothing", SYNC, "signal", "'release'", "'relaxed'", SIGNALS, SENDS),
    Fault("a wait does not acquire", SYNC, "_poll", "'acquire'", "'relaxed'", ACQUIRES, LOOKS),
    Fault("a lock does not acquire", "iris/device/lock.py", "_try", "'acquire'", "'relaxed'", ACQUIRES, LOOKS),
    Fault("programs see gathered rows too early", "iris_ops/kernels/lamport_gather_matmul.py",
          "lamport_gather_matmul_kernel", "'acq_rel'", "'relaxed'", ACQUIRES, LOOKS),
    Fault("nobody waits until the peers have entered", SYNC, "await_entered", "_wait_all(...)", "True", BOTH),
    Fault("a call ends before its peers' stores are done", SYNC, "leave", "_wait_all(...)", "None", BOTH),
    Fault("a wait does not look whether its peer lives", SYNC, "_poll", "arch.any_gone(...)", "False", (*EPOCHS, *LOST)),
    Fault("a wait for waiting peers is as short as theirs", "iris/device/waits.py", "deadline", "patience", "1", (*LOST, *EPOCHS)),
    Fault("a record names the peer as its group counts it", "iris/device/waits.py", "report", "_name(ctx, peer)",
          "tl.cast(peer, tl.int64)", LOST),
    Fault("a gather waits for the first piece of rows", GATHER_FIRST, "gather_matmul_kernel", "range(PIECES)", "range(1)", BOTH),
    Fault("a rank without tiles awaits no rows", GATHER_FIRST, "gather_matmul_kernel", "num_n == 0", "num_n < 0", EPOCHS),
    Fault("a gather by flags ends before its parts are here", FLAGS, "flags_kernel",
          "wait_others(ctx, done + lane, LANES, epoch, WAITER)", "None", COLLECTIVES),
    Fault("a rank without rows hears from nobody", FEW, "lamport_matmul_kernel", "exchange.hear_from_peers(...)", "None", LAMPORT),
    Fault("a sender goes on without credit", TRANSFER, "transfer_kernel", "sent + needed - slots", "sent + needed - 2 * slots", TRANSFERS),
    Fault("copies begin before the peers have entered", "iris_ops/with_torch/copy_gather.py", "again", "workspace.meet()",
          "None", ("tests/iris_ops/test_copy_gather.py",)),
    Fault("nobody waits for a grown workspace", "iris/ccl/workspace.py", "reserve", "self.group.barrier()", "None", COLLECTIVES),
    Fault("a rank that gives up on a peer tells nobody", "iris/channel.py", "_loss", "self.tell(...)", "None",
          ("tests/iris/test_lost_ranks.py::test_who_gives_up_on_a_rank_tells_the_others",)),
    Fault("a rank without a device fails alone", "iris/context.py", "_make", "ranks.together('the device', self._own_device)",
          "self._own_device()", ("tests/iris/test_creation.py::test_no_rank_fails_alone_while_a_context_is_made[the device]",)),
    # --- epochs and double buffers ------------------------------------------------------------------------------------
    Fault("flags are compared without a wrap", SYNC, "_reached", "seen - expected >= 0", "seen >= expected", EPOCHS),
    Fault("an exact wait takes later epochs too", SYNC, "_reached", "seen == expected", "seen - expected >= 0", EPOCHS),
    Fault("an epoch may be 0", SYNC, "epoch_behind", "epoch == 0", "epoch != epoch", EPOCHS),
    Fault("the count of tiles is not started again", SYNC, "leave", "tl.store(sync + _NEXT_TILE, 0)", "None", OPS),
    Fault("a collective does not advance its epoch", SYNC, "advance", "tl.store(sync, epoch)", "None", COLLECTIVES),
    Fault("few rows do not advance their epoch", FEW, "lamport_matmul_kernel", "advance(...)", "None", LAMPORT),
    Fault("a barrier keeps one half of digests", SYNC, "device_barrier_kernel", "counts & 1", "counts & 0",
          ("tests/iris/test_different_heaps.py", "tests/iris/test_litmus.py")),
    Fault("a reduce-scatter by flags has one half", FLAGS, "flags_kernel", "epoch & 1", "epoch & 0", COLLECTIVES),
    Fault("values of all calls share a half", "iris/ccl/lamport.py", "lamport_kernel", "epoch & 1", "epoch & 0", COLLECTIVES),
    Fault("what is sent may be the sentinel", LAMPORT_VALUES, "without_sentinel", "values == SENTINEL", "values != values", EXCHANGE),
    Fault("values that were taken stay", LAMPORT_VALUES, "take", "tl.store(...)", "None", EXCHANGE),
    Fault("a slot keeps what was taken from it", TRANSFER, "_whole", "tl.store(place, SENTINEL, mask=mask)", "None", TRANSFERS),
    Fault("a unit's flag stays", TRANSFER, "_awaited", "tl.store(flag, 0)", "None",
          ("tests/iris/test_transfers.py::test_elements_like_the_sentinel_are_awaited",)),
    Fault("sums stay for the next call but one", "iris/ccl/accumulate.py", "accumulate_kernel",
          "tl.store(place, tl.zeros((BLOCK,), staging.dtype.element_ty))", "None", COLLECTIVES),
    # --- orders and places --------------------------------------------------------------------------------------------
    Fault("a rank tells the wrong peer where its result lies", PLACES, "tell_out", "places + ctx.world_size - i", "places + i", OUTPUTS),
    Fault("a difference at the last peer is overwritten", PLACES, "matching_places", "tl.where(...)", "tl.where((told == own) | handed_out, -1, peer)",
          ("tests/iris/test_places_of_results.py",)),
    Fault("all tiles of a call stand in one place", "iris/device/tiles.py", "_blocks", "tl.cast(number, tl.int64) * size", "0", TILES),
    Fault("an owner sums from its own rank on", SUMS, "_sum_in_rank_order", "i * owned + index",
          "(i + ctx.rank) % WORLD_SIZE * owned + index",          ("tests/iris_ops/test_invariance.py",)),
    Fault("peers' rows are multiplied in the wrong order", TURNS, "sources_in_turn", "rank + WORLD_SIZE - inside // per_part",
          "rank + inside // per_part", (*OPS, *ORDER)),
    Fault("others' early tiles are counted once", TURNS, "turn", "early * others", "early", ORDER),
    Fault("the last steps of a shared tile are nobody's", "iris_ops/kernels/stream_k.py", "at", "end >= border", "end > border", ORDER),
    Fault("values go to the wrong peer first", "iris/ccl/lamport.py", "_unit_and_part", "ctx.rank + 1 + item % OTHERS",
          "ctx.rank + item % OTHERS", COLLECTIVES),
]  # fmt: skip
