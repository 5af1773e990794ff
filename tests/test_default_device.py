"""A default device that the user sets decides nothing here: each tensor that the library makes names its own."""

from __future__ import annotations

import ast
from pathlib import Path

import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN
from tests.processes import ROOT

# Of torch's functions that make tensors of no other tensor; `Generator` takes its device by position.
FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def unnamed(source: str) -> list[int]:
    """The lines at which a call of a factory names no device, nor a tensor to write to."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if _is_factory(call) and not _names_a_device(call)]


def _is_factory(call: ast.Call) -> bool:
    function = call.func
    of_torch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return of_torch and function.value.id == "torch" and function.attr in {*FACTORIES, "Generator"}


def _names_a_device(call: ast.Call) -> bool:
    by_position = call.func.attr == "Generator" and call.args
    return bool(by_position) or any(keyword.arg in ("device", "out", None) for keyword in call.keywords)


@pytest.mark.parametrize("package", ["iris", "iris_ops", "layers", "iris_tp"])
def test_every_tensor_names_its_device(package: str) -> None:
    paths = sorted(Path(ROOT, package).rglob("*.py"))
    unmarked = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unnamed(path.read_text())]
    assert paths and not unmarked, unmarked


def test_a_call_without_a_device_is_found() -> None:
    assert unnamed("torch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.Generator()\ntorch.Generator('cpu')") == [1, 3]


def with_default(rank: int, world: int, folder: Path) -> list:
    import iris

    from tests.layers import models

    whole, prompt = models.build("plain"), models.prompt()
    if rank == 0:
        whole.save_pretrained(folder)
    expected = models.generate(whole)
    a, b = torch.ones(8, 5), torch.ones(5, 6)
    torch.set_default_device("meta")
    with iris.iris(1 << 26) as ctx:
        out, gathered = ctx.empty(8, 6), ctx.zeros(world, 4)
        ctx.ops.matmul_all_reduce(out, a, b)
        ctx.ccl.all_gather(gathered, ctx.full((1, 4), float(rank)))
        ctx.tracing.enable(64)
        ctx.barrier()
        assert (out == 5 * world).all() and gathered[:, 0].tolist() == list(range(world))
        assert iris.do_bench(lambda: None, n_warmup=0, n_repeat=2, quantiles=[0.5]) >= 0
        for split in (_split(whole, ctx), layers.from_pretrained(folder, ctx)):
            assert torch.equal(split.generate(prompt, max_new_tokens=models.NEW, do_sample=False), expected)
            engine = layers.Engine(split, ctx, prompt.shape[0], 32)
            greedy = engine.generate(prompt.tolist(), 3)
            engine.generate(prompt, 3, temperature=0.7)
    return [list(map(int, row)) for row in greedy]


def _split(whole, ctx):
    layers.parallelize(whole, ctx)
    return whole


@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
def test_a_run_with_tensors_on_another_device_by_default(tmp_path: Path) -> None:
    from tests.processes import run_fresh

    ended = run_fresh(2, with_default, tmp_path, timeout=180)
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]
    assert ended[0].result == ended[1].result
