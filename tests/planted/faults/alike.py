"""What would make a row's bits depend on how many rows there are."""

from .fault import Fault

INVARIANCE = ("tests/iris_ops/test_invariance.py",)
ORDERS = ("tests/iris_ops/test_orders.py",)
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
        "if not problem.invariant or (wanted and each.order == wanted)",
        "if not problem.invariant or wanted",
        ORDERS,
    ),
    Fault(
        "the order depends on the number of rows",
        "iris_ops/planning/plan.py",
        "orders.chosen(replace(problem, M=0), machine, _offers) if problem.invariant else None",
        "candidates[0].order if problem.invariant else None",
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
]
