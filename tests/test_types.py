"""Every host function has type annotations, and a user's type checker reads them."""

import ast
from pathlib import Path
import subprocess
import sys
import textwrap

import pytest

from tests.processes import ROOT, patient

PACKAGES = ("iris", "iris_ops", "iris_tp", "layers")
# Triton reads annotations of what it compiles as its own, and what stands in for parts of its interpreter is called by
# it alone.
DEVICE = {"device_function", "triton.jit", "gluon.jit", "triton.constexpr_function"}
INTERPRETER = ROOT / "iris" / "device" / "interpreter"


def unannotated(node: ast.AST, path: str) -> list[str]:
    """The functions of the host inside `node` that lack an annotation."""
    untyped = []
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef):
            decorators = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in each.decorator_list}
            if decorators & DEVICE:
                continue
            arguments = each.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            bound = isinstance(node, ast.ClassDef) and "staticmethod" not in decorators
            missing = [one.arg for one in given[bound:] if one is not None and one.annotation is None]
            if missing or (each.returns is None and each.name != "__init__"):
                untyped.append(f"{path}:{each.lineno} {each.name}")
        untyped += unannotated(each, path)
    return untyped


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_annotated(package):
    """mypy skips functions without annotations, such as kernels, so this test requires them for host functions."""
    untyped = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if INTERPRETER not in path.parents:
            untyped += unannotated(ast.parse(path.read_text()), str(path.relative_to(ROOT)))
    assert not untyped


RIGHT = """
    import iris
    from iris import ccl
    from iris_ops import FusedConfig
    import layers
    import torch
    from torch import nn
    from typing_extensions import assert_type

    def sum_up(ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = ctx.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        config = ctx.ops.plan("matmul_all_reduce", x.shape[0], weight.shape[0], x.shape[1], x.dtype)
        assert_type(config, FusedConfig)
        workspace = ctx.ops.matmul_all_reduce(out, x, weight.t(), async_op=True, config=config)
        workspace.wait()
        ctx.ccl.all_reduce(out, out, op=ccl.ReduceOp.SUM, config=ccl.Config())
        assert_type(ctx.get_rank(), int)
        return out

    def answers(model: nn.Module) -> list[list[int]]:
        with iris.iris(heap_size=1 << 30) as ctx:
            assert_type(layers.parallelize(model, ctx, plan={"lm_head": "colwise_gather_output"}), layers.Report)
            model = layers.from_pretrained("model", ctx, fuse=True)
            model.generate(max_new_tokens=2)
            assert_type(model.parallel_report, layers.Report)
            engine = layers.Engine(model, ctx, batch_size=2)
            return engine.generate([[1, 2, 3]], max_new_tokens=8, temperature=0.7, stop=2)

    def linear(ctx: iris.Iris, whole: nn.Linear) -> layers.RowParallelLinear:
        return layers.RowParallelLinear.from_linear(whole, ctx=ctx).eval()
"""
WRONG = """
    import iris
    from iris_ops import FusedConfig
    import layers

    iris.iris(heap_size="1G")  # wrong
    ctx = iris.iris()
    x = ctx.zeros(4, 4)
    ctx.ops.matmul_all_reduce(x, x, x, configuration=FusedConfig(64, 64, 64))  # wrong
    ctx.ccl.all_reduce(x, x, config=FusedConfig(64, 64, 64))  # wrong
    ctx.barrier(group=3)  # wrong
    model = layers.from_pretrained("model", ctx, fuse=True)
    model = layers.from_pretrained("model", ctx, weight="fp8")  # wrong
    layers.parallelize(model, ctx, fuse="yes")  # wrong
    layers.ColumnParallelLinear(16, 32)  # wrong
    layers.Engine(model, ctx).generate([[1]], temperature="hot")  # wrong
    ctx.plan("matmul_all_reduce")  # wrong
    iris.load(x, 0)  # wrong
"""


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(300))


@pytest.fixture(scope="module")
def of_packages() -> subprocess.CompletedProcess:
    """Run mypy on the packages, so that it knows them when it checks a program that uses them."""
    return mypy()


def test_the_packages_are_right(of_packages):
    """A test, so that `make test` need not wait for it."""
    assert of_packages.returncode == 0, of_packages.stdout + of_packages.stderr


def reported(source: str, folder: Path) -> dict[int, str]:
    """Return mypy's messages about a program, by line."""
    path = folder / "program.py"
    path.write_text(source)
    result = mypy("--no-error-summary", "--hide-error-context", str(path))
    assert result.returncode in (0, 1), result.stdout + result.stderr
    lines = [line.split(":", 3) for line in result.stdout.splitlines()]
    return {int(number): message for _, number, kind, message in lines if kind == " error"}


def test_a_users_program_is_checked(of_packages, tmp_path):
    assert reported(textwrap.dedent(RIGHT), tmp_path) == {}
    wrong = textwrap.dedent(WRONG)
    lines = [i for i, line in enumerate(wrong.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(reported(wrong, tmp_path)) == lines


def test_packages_say_that_they_have_types():
    assert '"py.typed"]' in (ROOT / "pyproject.toml").read_text()
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)
