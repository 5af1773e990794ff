"""What a planted fault is, and the tests that several are noticed by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `new` stands where `old` should; `tests`, files or tests of files, should fail then.

    `missed`: why no test can see it without a GPU, of a fault for which that is so, and `on_gpus` the tests that see it
    there. `kernels`: a regular expression of the compiled kernels that the tests look at; without it all are compiled.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""
    on_gpus: tuple[str, ...] = ()
    kernels: str = ""


OPS = ("tests/iris_ops/test_ops.py",)
EPOCHS = ("tests/iris_ops/test_epoch.py",)
LAMPORT = ("tests/iris_ops/test_lamport_matmul.py", *OPS, *EPOCHS)
ORDER = ("tests/iris_ops/test_order.py",)
PLAN = ("tests/iris_ops/test_plan.py", "tests/iris_ops/test_predictions.py", "tests/iris_ops/test_problem.py")
ARGUMENTS = ("tests/iris_ops/test_bad_input.py", *PLAN)
FP8 = ("tests/iris_ops/test_fp8.py", "tests/iris_ops/test_fp8_refused.py")
NORM = ("tests/iris_ops/test_rmsnorm_epilogue.py",)
GATED = ("tests/iris_ops/test_gated.py", "tests/layers/test_gated.py")
COLLECTIVES = ("tests/iris/test_ccl.py", "tests/iris/test_ccl_calls.py")
EXCHANGE = ("tests/iris/test_lamport.py", *LAMPORT)
LOST = ("tests/iris/test_lost_ranks.py", "tests/iris/test_failures.py", "tests/iris/test_ccl_calls.py")
HEAPS = ("tests/iris/test_different_heaps.py",)
OUTPUTS = ("tests/iris_ops/test_outputs.py",)
RMA = ("tests/iris/test_rma.py", "tests/iris/test_atomics.py")
PTX = "tests/test_codegen_ptx.py::test_ptx_"
PTX_HOPPER = "tests/test_codegen_hopper.py::test_ptx_"
SHARDS = ("tests/layers/test_shard.py", "tests/layers/test_linear.py")
LOADER = (
    "tests/layers/test_saving.py",
    "tests/layers/test_pretrained.py",
    "tests/layers/test_bad_checkpoints.py",
    "tests/layers/test_malformed.py",
)
ENGINE = ("tests/layers/test_engine.py", "tests/layers/test_generation.py")
ATTENTION = ("tests/layers/test_decode_attention.py", "tests/layers/test_prefill_attention.py")
STEPS = ("tests/layers/test_skinny_matmul.py",)
HOPPER = ("tests/iris_ops/test_hopper.py::test_op_is_right", "tests/iris_ops/test_hopper.py::test_random_calls")
ON_HOPPER = "specialised warps run on Hopper only, and the number of stores in the PTX is the same"
