"""What would make a row's bits depend on how many rows there are, or on how many ranks."""

from .fault import Fault

INVARIANCE = ("tests/iris_ops/test_invariance.py",)
ORDERS = ("tests/iris_ops/test_orders.py",)
_RANKS = "tests/iris_ops/test_ranks_invariance.py::"
SUMS = (f"{_RANKS}test_a_sum_has_the_same_bits_on_any_number_of_ranks",)
GATHERS = (f"{_RANKS}test_a_gather_has_the_same_bits_on_any_number_of_ranks",)
REFUSED = (f"{_RANKS}test_what_cannot_be_kept_is_refused_on_every_rank",)
ALIKE = [
    Fault(
        "an owner's own partial sum is not rounded as its peers' are",
        "iris_ops/kernels/matmul_reduce.py",
        "ctx, arch.round_to(acc, dtype), staging, index",
        "ctx, acc, staging, index",
        INVARIANCE,
    ),
    Fault(
        "an owner sums from its own rank on",
        "iris_ops/kernels/matmul_reduce.py",
        "staged = packed_rows(staging, i * owned + index, down, BLOCK_M, BLOCK_N)",
        "staged = packed_rows(staging, (ctx.rank + i) % WORLD_SIZE * owned + index, down, BLOCK_M, BLOCK_N)",
        INVARIANCE,
    ),
    Fault(
        "a plan takes ways of any order",
        "iris_ops/planning/plan.py",
        "alike = [each for each, order in known if wanted and order == wanted]",
        "alike = [each for each, order in known if wanted]",
        ORDERS,
    ),
    Fault(
        "the order depends on the number of rows",
        "iris_ops/planning/plan.py",
        "wanted = wanted_order(ways, replace(problem, M=0), machine)",
        "wanted = known[0][1] if (known := [(c, c.way.order(problem, c.config, machine)) for c in allowed]) else None",
        ORDERS,
    ),
    Fault(
        "the interpreter's products are those that numpy takes",
        "iris/device/interpreter/builder.py",
        "if d.data.dtype == np.float32 and x.ndim == 2:",
        "if False:",
        INVARIANCE,
    ),
    Fault(
        "a gathered product is a library's",
        "iris_ops/local/matmul.py",
        "made = torch.from_numpy(fixed_order.product(_array(A), _array(B)))",
        "made = A.float() @ B.float()",
        ("tests/layers/test_invariance.py",),
    ),
    Fault(
        "a mixture's router is multiplied by torch",
        "layers/hf/parallelize.py",
        "    if ctx.invariant:\n        keep_rows_alike(model, ctx)\n",
        "",
        ("tests/layers/test_invariance.py",),
    ),
    Fault(
        "roots are joined in the order of ranks, not in the tree's",
        "iris_ops/kernels/tree_matmul.py",
        "waiting = joined(arch.round_to(value, dtype), waiting, number_at(JOINS, i))",
        "waiting = joined(arch.round_to(value, dtype), waiting, 1 if i > 0 else 0)",
        SUMS,
    ),
    Fault(
        "a sum is rounded only where another rank adds to it",
        "iris_ops/kernels/tree_steps.py",
        "value = arch.round_to(waiting[0].to(tl.float32) + value.to(tl.float32), value.dtype)",
        "value = waiting[0].to(tl.float32) + value.to(tl.float32)",
        SUMS,
    ),
    Fault(
        "a leaf is summed on top of the one before it",
        "iris_ops/kernels/tree_steps.py",
        "& tl.where(ends, 0, -1)",
        "& tl.where(ends, -1, -1)",
        SUMS,
    ),
    Fault(
        "leaves are as wide as a rank's own K asks",
        "iris_ops/sum_tree.py",
        "    K = sum(depths)\n    return Tree(",
        "    K = max(depths)\n    return Tree(",
        ("tests/iris_ops/test_sum_tree.py",),
    ),
    Fault(
        "on any number of ranks a gather is summed in the order that is fastest there",
        "iris_ops/planning/orders.py",
        "    if problem.invariant == RANKS:\n        return min(",
        "    if False:\n        return min(",
        GATHERS,
    ),
    Fault(
        "parts of A that begin within a block are multiplied apart, on any number of ranks",
        "iris_ops/planning/orders.py",
        "            if problem.invariant == RANKS:\n                return None\n",
        "",
        REFUSED,
    ),
    Fault(
        "a share may cut a leaf",
        "iris_ops/sum_tree.py",
        "if not all(end in borders for end in ends):",
        "if False:",
        REFUSED,
    ),
]
