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
        if not replacing.count:
            raise LookupError(f"{self.name}: {self.old} is not in {self.function} of {self.file}")
        return ast.unparse(ast.fix_missing_locations(tree))


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new, self.count = old, new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if _alike(node, self.old):
            self.count += 1
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

# By file: the fault, the function, what is replaced by what, the tests, and the kernels at which they look.
_FAULTS: dict[str, tuple[tuple, ...]] = {
    "iris/device/sync.py": (
        ("a signal releases nothing", "signal", "'release'", "'relaxed'", SIGNALS, SENDS),
        ("a wait does not acquire", "_poll", "'acquire'", "'relaxed'", ACQUIRES, LOOKS),
        ("nobody waits until the peers have entered", "await_entered", "_wait_all(...)", "True", BOTH),
        ("a call ends before its peers' stores are done", "leave", "_wait_all(...)", "None", BOTH),
        ("a wait does not look whether its peer lives", "_poll", "arch.any_gone(...)", "False", EPOCHS + LOST),
        ("flags are compared without a wrap", "_reached", "seen - expected >= 0", "seen >= expected", EPOCHS),
        ("an exact wait takes later epochs too", "_reached", "seen == expected", "seen - expected >= 0", EPOCHS),
        ("an epoch may be 0", "epoch_after", "epoch == 0", "epoch != epoch", EPOCHS),
        ("the count of tiles is not started again", "leave", "tl.store(sync + _NEXT_TILE, 0)", "None", OPS),
        ("a collective does not advance its epoch", "advance", "tl.store(sync, epoch)", "None", COLLECTIVES),
        ("a barrier keeps one half of digests", "device_barrier_kernel", "counts & 1",
         "counts & 0", ("tests/iris/test_different_heaps.py", "tests/iris/test_litmus.py",)),
    ),
    "iris/device/lock.py": (
        ("a lock does not acquire", "_try", "'acquire'", "'relaxed'", ACQUIRES, LOOKS),
    ),
    "iris_ops/kernels/lamport_gather_matmul.py": (
        ("programs see gathered rows too early", "lamport_gather_matmul_kernel", "'acq_rel'",
         "'relaxed'", ACQUIRES, LOOKS),
    ),
    "iris/device/waits.py": (
        ("a wait for waiting peers is as short as theirs", "deadline", "patience", "1", LOST + EPOCHS),
        ("a record names the peer as its group counts it", "_report", "_name(ctx_ptr, peer)",
         "tl.cast(peer, tl.int64)", LOST),
    ),
    "iris_ops/kernels/gather_matmul.py": (
        ("a gather waits for the first piece of rows", "gather_matmul_kernel", "range(PIECES)", "range(1)", BOTH),
        ("a rank without tiles awaits no rows", "gather_matmul_kernel", "num_n == 0", "num_n < 0", EPOCHS),
    ),
    "iris/ccl/flags.py": (
        ("a gather by flags ends before its parts are here", "flags_kernel",
         "wait_others(ctx, done + lane, LANES, epoch, WAITER)", "None", COLLECTIVES),
        ("a reduce-scatter by flags has one half", "flags_kernel", "epoch & 1", "epoch & 0", COLLECTIVES),
    ),
    "iris_ops/kernels/lamport_matmul.py": (
        ("a rank without rows waits for nobody", "lamport_matmul_kernel", "exchange.wait_for_peers(...)",
         "None", LAMPORT),
        ("few rows do not advance their epoch", "lamport_matmul_kernel", "advance(...)", "None", LAMPORT),
    ),
    "iris/ccl/transfer.py": (
        ("a sender goes on without credit", "transfer_kernel", "sent + needed - slots",
         "sent + needed - 2 * slots", TRANSFERS),
        ("a slot keeps what was taken from it", "_whole", "tl.store(place, SENTINEL, mask=mask)", "None", TRANSFERS),
        ("a unit's flag stays", "_awaited", "tl.store(flag, 0)",
         "None", ("tests/iris/test_transfers.py::test_elements_like_the_sentinel_are_awaited",)),
    ),
    "iris_ops/with_torch/copy_gather.py": (
        ("copies begin before the peers have entered", "again", "workspace.rendezvous()",
         "None", ("tests/iris_ops/test_copy_gather.py",)),
    ),
    "iris/ccl/workspace.py": (
        ("nobody waits for a grown workspace", "reserve", "self.group.barrier()", "None", COLLECTIVES),
    ),
    "iris/connections.py": (
        ("a rank that gives up on a peer tells nobody", "loss", "self.post(...)",
         "None", ("tests/iris/test_lost_ranks.py::test_who_gives_up_on_a_rank_tells_the_others",)),
    ),
    "iris/context.py": (
        ("a rank without a device fails alone", "_make", "ranks.together('the device', self._own_device)",
         "self._own_device()", ("tests/iris/test_creation.py::test_no_rank_fails_alone_while_a_context_is_made",)),
    ),
    "iris/ccl/lamport.py": (
        ("values of all calls share a half", "lamport_kernel", "epoch & 1", "epoch & 0", COLLECTIVES),
        ("values go to the wrong peer first", "_unit_and_part", "ctx.rank + 1 + item % OTHERS",
         "ctx.rank + item % OTHERS", COLLECTIVES),
    ),
    "iris/device/lamport.py": (
        ("what is sent may be the sentinel", "without_sentinel", "values == SENTINEL", "values != values", EXCHANGE),
        ("values that were taken stay", "take", "tl.store(...)", "None", EXCHANGE),
    ),
    "iris/ccl/accumulate.py": (
        ("sums stay for the next call but one", "accumulate_kernel",
         "tl.store(place, tl.zeros((BLOCK,), staging.dtype.element_ty))", "None", COLLECTIVES),
    ),
    "iris/device/places.py": (
        ("a rank tells the wrong peer where its result lies", "publish_out", "places + ctx.world_size - i",
         "places + i", OUTPUTS),
        ("a difference at the last peer is overwritten", "matching_places", "tl.where(...)",
         "tl.where((theirs == own) | handed_out, -1, peer)", ("tests/iris/test_places_of_results.py",)),
    ),
    "iris/device/tiles.py": (
        ("all tiles of a call stand in one place", "_blocks", "tl.cast(number, tl.int64) * size", "0", TILES),
    ),
    "iris_ops/kernels/matmul_reduce.py": (
        ("an owner sums from its own rank on", "_sum_in_rank_order", "i * owned + index",
         "(i + ctx.rank) % WORLD_SIZE * owned + index", ("tests/iris_ops/test_invariance.py",)),
    ),
    "iris_ops/kernels/tile_orders.py": (
        ("peers' rows are multiplied in the wrong order", "sources_in_turn", "rank + WORLD_SIZE - inside // per_part",
         "rank + inside // per_part", OPS + ORDER),
        ("others' early tiles are counted once", "turn", "early * others", "early", ORDER),
    ),
    "iris_ops/kernels/stream_k.py": (
        ("the last steps of a shared tile are nobody's", "at", "end >= border", "end > border", ORDER),
    ),
}  # fmt: skip
FAULTS = [Fault(name, file, *rest) for file, rows in _FAULTS.items() for name, *rest in rows]
