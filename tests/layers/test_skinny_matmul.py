"""The product of a step's few rows, against float64: odd sizes, biases, gates, rows apart; and who is served by it."""

from __future__ import annotations

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris_ops.kernels.rmsnorm_epilogue import first_half
from iris_ops.local import skinny_matmul
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.weights import format_of
from iris_ops.quantised import scaled_matmul
import layers
from layers.hf.gated_mlp import GatedMLP
import pytest
import torch
from torch.nn import functional as F

from tests.harness import UNDER_TORCHRUN, both, run_ranks
from tests.layers import models

pytestmark = both
DEVICE = "cuda" if UNDER_TORCHRUN and torch.cuda.is_available() else "cpu"
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}

EPILOGUE = {False: "", True: GATE.name}


def reference(x, weight, bias, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """In float64 but for the rounding of both halves of a gated product, as a linear's output is."""
    result = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if not gated:
        return result
    gate, up = result.to(dtype).double().chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "rows, outputs, depth, bias",
    [
        ((1,), 64, 256, False),
        ((3, 1), 70, 136, True),
        ((2, 8), 10, 300, True),
        ((), 130, 24, False),
        ((17, 1), 64, 264, True),
        ((32,), 70, 520, False),
        ((3, 11), 10, 300, True),
        ((64, 1), 100, 264, False),
        ((64,), 200, 264, True),
        ((2, 64), 100, 136, False),
        ((5, 13), 70, 136, True),
        ((127,), 130, 264, False),
    ],
)
@pytest.mark.parametrize("room", [1, 9, 132])
@pytest.mark.some(24, on_gpus=48)
def test_few_rows(monkeypatch, rows, outputs: int, depth: int, bias: bool, room: int, gated: bool, dtype) -> None:
    """`room`: the simulated number of multiprocessors, which decides how rows are divided."""
    monkeypatch.setattr(skinny_matmul.platform, "num_programs", lambda device: room)
    torch.manual_seed(outputs)
    like = {"device": DEVICE, "dtype": dtype}
    x = torch.randn(*rows, 2 * depth, **like)[..., :depth]  # rows lie apart
    weight = torch.randn((1 + gated) * outputs, depth, **like) * depth**-0.5
    added = torch.randn((1 + gated) * outputs, **like) if bias else None
    out = skinny_matmul.skinny_matmul(x, weight, added, None, EPILOGUE[gated])
    expected = reference(x, weight, added, gated, dtype)
    assert out.shape == (*rows, outputs) and out.dtype == dtype

    def missed(result: torch.Tensor) -> float:
        return ((result.double() - expected).norm() / expected.norm()).item()

    # a sum on the border between two numbers may be rounded to the other one before the gate
    assert missed(out) <= (2 if gated else 0.6) * EPS[dtype]
    assert missed(skinny_matmul.skinny_matmul(x, weight.roll(1, 0), added, None, EPILOGUE[gated])) > 0.1


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "rows, outputs, depth",
    [
        ((1,), 64, 256),
        ((3, 1), 70, 136),
        ((16,), 20, 320),
        ((29, 1), 70, 136),
        ((64,), 20, 4160),
        ((64,), 200, 136),
        ((70,), 20, 136),
    ],
)
@pytest.mark.some(5, on_gpus=14)
def test_rows_scaled_by_the_second_half_of_a_norm(monkeypatch, rows, outputs: int, depth: int, gated: bool) -> None:
    if outputs == 200:  # in narrow tiles
        monkeypatch.setattr(skinny_matmul.platform, "num_programs", lambda device: 9)
    torch.manual_seed(depth)
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    h, norm = torch.randn(*rows, depth, **like) * 30, torch.randn(depth, **like)
    weight, bias = torch.randn((1 + gated) * outputs, depth, **like), torch.randn((1 + gated) * outputs, **like)
    scaled, squares = first_half(h, norm)
    out = skinny_matmul.skinny_matmul(scaled, weight, bias, None, EPILOGUE[gated], squares, 1e-5)
    x = h.double() / (h.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    expected = reference(x, weight, bias, gated, torch.bfloat16)
    assert (out.double() - expected).norm() <= (2 + gated) * EPS[torch.bfloat16] * expected.norm()
    torch.library.opcheck(
        torch.ops.iris_ops.skinny_matmul, (scaled, weight, bias, None, EPILOGUE[gated], squares, 1e-5)
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [(1,), (2, 1, 3), (8,), (9,), (16,)])
@pytest.mark.parametrize("outputs, depth", [(16, 128), (1000, 640), (5120, 1280), (2560, 5120), (70000, 256)])
def test_fp8_weights(rows: tuple, outputs: int, depth: int, gated: bool) -> None:
    torch.manual_seed(outputs + depth)
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    weight = torch.randn((1 + gated) * outputs, depth, device=DEVICE) * depth**-0.5
    weight[1::2] *= torch.rand_like(weight[1::2]) ** 9  # many that e4m3 has no full precision for
    weight, scale = scaled_matmul.quantised(weight)
    exact = scaled_matmul.restored(weight, scale, torch.float64)
    wide = torch.randn(*rows, depth + 8, **like)
    bias, norm = torch.randn((1 + gated) * outputs, **like), torch.randn(depth, **like)
    odd = torch.randn(*rows, depth + 9, **like)
    for x in (wide[..., :depth], wide[..., 8:].contiguous(), odd[..., 1:-8]):
        for added in (None, bias):
            out = skinny_matmul.skinny_matmul(x, weight, added, scale, EPILOGUE[gated])
            expected = reference(x, exact, added, gated, x.dtype)
            assert out.shape == (*rows, outputs)
            assert (out.double() - expected).norm() <= (2 if gated else 1) * 2**-8 * expected.norm()
    scaled, squares = first_half(wide[..., :depth] * 30, norm)
    out = skinny_matmul.skinny_matmul(scaled, weight, bias, scale, EPILOGUE[gated], squares, 1e-5)
    h = (wide[..., :depth] * 30).double()
    expected = reference(h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm, exact, bias, gated, x.dtype)
    assert (out.double() - expected).norm() <= (2 + gated) * 2**-8 * expected.norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_fp8_weights_that_are_not_served() -> None:
    x, weight = torch.randn(2, 96, device=DEVICE).bfloat16(), torch.randn(32, 96, device=DEVICE)
    rounded, scale = scaled_matmul.quantised(weight)
    assert not format_of(rounded.t(), scale).streamable(*x.shape)
    out, expected = skinny_matmul.linear(x, rounded, None, scale), x.double() @ weight.double().t()
    assert (out.double() - expected).norm() <= 0.06 * expected.norm()


def test_operands_may_lie_by_columns() -> None:
    x, weight = torch.randn(32, 3, device=DEVICE).half().t(), torch.randn(32, 20, device=DEVICE).half().t()
    out = skinny_matmul.skinny_matmul(x, weight)
    assert torch.equal(out, skinny_matmul.skinny_matmul(x.contiguous(), weight.contiguous()))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_only_what_is_captured_is_served() -> None:
    x, weight = torch.randn(16, 512, device=DEVICE).bfloat16(), torch.randn(128, 512, device=DEVICE).bfloat16()
    wide = weight.repeat(80, 1)
    assert not skinny_matmul.is_faster(x, weight)
    skinny_matmul.linear(x, weight)  # loads the kernel, which a capture could not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        served = skinny_matmul.is_faster(x, weight)
        others = [skinny_matmul.is_faster(*each) for each in ((x.repeat(2, 1), weight), (x.float(), weight.float()))]
        others.append(skinny_matmul.is_faster(x.repeat(5, 1), wide))
        served &= skinny_matmul.is_faster(x.repeat(4, 1), wide)
        out = skinny_matmul.linear(x, weight)
    assert served and not any(others)
    for seed in range(2):
        x.copy_(torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(x, weight, None, False, x.dtype)
        assert (out.double() - expected).norm() <= 2**-8 * expected.norm()


class Launches:
    """A kernel's launches: how many programs, and the arguments."""

    def __init__(self, kernel) -> None:
        self.kernel, self.seen = kernel, []

    def __getitem__(self, grid: tuple):
        def launch(*args, **constants):
            alike = [(each.dtype, each.shape) if isinstance(each, torch.Tensor) else each for each in args]
            self.seen.append((grid, alike, constants))
            return self.kernel[grid](*args, **constants)

        return launch


@pytest.mark.skipif(DEVICE != "cpu", reason="has the functions of its process exchanged")
@pytest.mark.parametrize("bias", [False, True])
def test_an_eager_call_loads_what_a_capture_launches(monkeypatch, bias: bool) -> None:
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(70, 40).bfloat16()
    added = weight[:, 0].clone() if bias else None
    kernel, capturing = Launches(skinny_matmul.skinny_matmul_kernel), []
    monkeypatch.setattr(skinny_matmul, "skinny_matmul_kernel", kernel)
    monkeypatch.setattr(skinny_matmul, "_loaded", set())
    monkeypatch.setattr(skinny_matmul, "_is_eligible", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    for _ in range(2):
        assert torch.equal(skinny_matmul.linear(x, weight, added), F.linear(x, weight, added))
    capturing.append(True)
    out = skinny_matmul.linear(x, weight, added)
    (loaded, *kinds), (launched, *same) = kernel.seen
    assert (loaded, launched) == ((0, 2), (1, 2)) and kinds == same
    assert torch.allclose(out, F.linear(x, weight, added), rtol=2e-2, atol=2e-2)


def engine_body(ctx, name: str, sequence_parallel: bool | int) -> tuple[list, list, int]:
    model = models.build(name)
    layers.parallelize(model, ctx, sequence_parallel=sequence_parallel)
    exchanged = sum(isinstance(module, GatedMLP) for module in model.modules())
    calls, own = [], skinny_matmul.skinny_matmul

    def counted(x, weight, bias=None, scale=None, epilogue=""):
        calls.append(epilogue)
        return own(x, weight, bias, scale, epilogue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny_matmul, "skinny_matmul", counted)
        patch.setattr(skinny_matmul, "is_faster", lambda x, weight, *_: 0 < x.shape[:-1].numel() <= 6)
        engine = layers.Engine(model, ctx, batch_size=2, max_length=16)
        return engine.generate(models.prompt().tolist(), models.NEW), calls, exchanged


@pytest.mark.skipif(DEVICE != "cpu", reason="has the functions of its process exchanged")
@pytest.mark.parametrize("name, gates", [("kv2", 2), ("width130", 2), ("bias", 2), ("offset_norm", 0)])
@pytest.mark.parametrize("sequence_parallel", [False, 4], ids=["all tokens", "sequence parallel"])
@pytest.mark.some(2)
def test_the_engine_makes_the_same_tokens_by_it(name: str, gates: int, sequence_parallel: bool | int) -> None:
    """14 tokens of prompts and three more; in sequence-parallel calls each of three ranks has at most six."""
    whole, steps = models.generate(models.build(name))[:, 7:].tolist(), models.NEW - 1
    for tokens, calls, exchanged in run_ranks(3, engine_body, name, sequence_parallel):
        assert tokens == whole
        assert exchanged == gates and calls.count(GATE.name) == steps * gates
        assert calls.count("") == steps * (2 if gates else 4)  # qkv, and gate and up where they are not gated
