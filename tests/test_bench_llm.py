"""The benchmark of whole models: it runs from end to end with every contender; a wrong one is named and not timed."""

import argparse
import copy
import json

import iris  # first: it may set up the interpreter
from layers.serving import attention
from layers.serving.engine import Engine
import pytest
import torch

from benchmarks import llm  # noqa: E402
from benchmarks.cases import engines, mixtures, truth, whole_models  # noqa: E402
from benchmarks.plots import llm_plots  # noqa: E402
from tests.coverage_of_models import tiny
from tests.processes import run_benchmark
from tests.test_benchmarks import alone  # noqa: F401  (a fixture)


@pytest.mark.slow
def test_every_contender_from_end_to_end(tmp_path):
    keys = ["ours", "nccl", "transformers", "ours-unshared", "sequence-nccl", "ours-fp8", "fp8-shared"]
    asked = ["--model", "tiny", "--contenders", ",".join(keys), "--rounds", "2", "--batches", "2", "--prompts", "3"]
    printed = run_benchmark("llm", 2, *asked, "--out", str(tmp_path), "--name", "tiny")
    report = json.loads((tmp_path / "tiny.json").read_text())
    (row,) = report["rows"]
    assert (row["batch"], row["prompt"], report["layers"], report["shortened"]) == (2, 3, 2, False)
    assert [result["key"] for result in row["results"]] == keys
    for result in row["results"]:
        assert result["status"] == "ok" and result["first_eager_ms"] > 0 and result["step_eager_ms"] > 0, result
        assert result["tokens_per_s"] == pytest.approx(2e3 / result["step_eager_ms"], rel=0.01)
        assert result["errors"].keys() == {"prompt, eager", "step, eager"}
        assert 0 < max(result["errors"].values()) <= row["limit"] < 1e-5
    assert "| 2 x 3" in printed and "left out" not in printed
    picture = llm_plots.draw(tmp_path / "tiny.json", tmp_path)[0].read_text()
    assert "transformers" in picture and "first token" in picture


MIXTURES = [name for name in mixtures.SHAPES if name.startswith("tiny-")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_from_end_to_end(name: str, tmp_path):
    asked = ["--model", name, "--contenders", "ours,nccl", "--rounds", "1", "--batches", "1,2", "--prompts", "5"]
    printed = run_benchmark("llm", 2, *asked, "--output", "3", "--out", str(tmp_path), "--name", "tiny")
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert [row["batch"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert [(each["key"], each["status"]) for each in row["results"]] == [("ours", "ok"), ("nccl", "ok")], row
        assert all(each["step_eager_ms"] > 0 for each in row["results"])
    assert "random routers, rows scaled: the busiest expert gets" in printed


def test_each_mixture_has_a_tiny_one_of_its_kinds() -> None:
    whole = [name for name in mixtures.SHAPES if name not in MIXTURES]
    assert MIXTURES == [f"tiny-{name}" for name in whole] and len(whole) == 5
    for name in whole:
        (kind, sizes), (small_kind, small) = mixtures.SHAPES[name], mixtures.SHAPES[f"tiny-{name}"]
        assert kind == small_kind and sizes.keys() <= small.keys() | {"rope_theta"}
        config = whole_models.config_of(f"tiny-{name}")
        assert config.num_hidden_layers == 2 and config.vocab_size == 128


def test_routers_send_experts_uneven_shares() -> None:
    """About as uneven as those of trained models are: some experts get several times the mean, others hardly any."""
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"router": Router(128, 2048)})
    even = mixtures.load(model, 8)
    mixtures.make_uneven(model)
    uneven = mixtures.load(model, 8)
    assert even is not None and uneven is not None
    assert even[0] < 1.4 and even[1] > 0.6
    assert 2 < uneven[0] < 6 and uneven[1] < 0.2


class Router(torch.nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.02 * torch.randn(experts, width))


class TooMuch(engines.NcclOps):
    def matmul_all_reduce(self, out, A, B, bias=None, config=None):
        super().matmul_all_reduce(out, A, B, bias)
        out *= 1.2


class HeadsExchanged(engines.NcclOps):
    """The first two heads' outputs, eight columns each."""

    def matmul_all_reduce(self, out, A, B, bias=None, config=None):
        order = [*range(8, 16), *range(8), *range(16, A.shape[1])]
        super().matmul_all_reduce(out, A[:, order], B, bias)


class RoundsOtherwise(engines.NcclOps):
    """Each half of the product rounded before they are added."""

    def matmul_all_reduce(self, out, A, B, bias=None, config=None):
        half = A.shape[1] // 2
        super().matmul_all_reduce(out, A[:, :half], B[:half], bias)
        out += A[:, half:] @ B[half:]


class Raises(engines.NcclOps):
    def matmul_all_gather(self, out, A, B, bias=None, config=None):
        raise ValueError("no such gather")


def test_true_logits_are_those_of_a_wider_model_and_leave_the_model_as_it_was(alone):  # noqa: F811
    with iris.iris(1 << 24) as ctx:
        model, wide = (whole_models.build("tiny", 2, ctx, torch.bfloat16) for _ in range(2))
        tokens = torch.randint(0, 128, (2, 6))
        before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
        (nccl,), _ = engines.contenders(alone, ctx, model, ["nccl"])
        nccl.prepare()
        logits = truth.true_logits(model, tokens, 64)
        expected = wide.float()(input_ids=tokens).logits
        assert torch.allclose(logits["prompt"], expected[:, -2], 1e-4, 1e-6)
        assert torch.allclose(logits["step"], expected[:, -1], 1e-4, 1e-6)
        with pytest.raises(ValueError, match="no such gather"):
            engines.serve(model, argparse.Namespace(**{**vars(nccl.context), "ops": Raises()}))
            truth.true_logits(model, tokens, 64)
        assert before == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
        assert model.config._attn_implementation == wide.config._attn_implementation


def test_true_logits_keep_an_attention_of_the_models_own_once_an_engine_makes_its_masks():
    model = tiny.build("gpt_oss").bfloat16()
    tokens = torch.randint(1, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = copy.deepcopy(model).float()(tokens).logits
    assert attention.use_own_masks(model)
    logits = truth.true_logits(model, tokens, 16)
    for name, place in (("prompt", -2), ("step", -1)):
        assert torch.allclose(logits[name], expected[:, place], 1e-4, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_wrong_contender_and_one_that_raises_are_named(alone, dtype):  # noqa: F811
    with iris.iris(1 << 24) as ctx:
        model = whole_models.build("tiny", 1, ctx, getattr(torch, dtype))
        found, failed = engines.contenders(alone, ctx, model, ["nccl", "ours"])
        assert not failed
        for ops in (RoundsOtherwise(), TooMuch(), HeadsExchanged(), Raises()):
            swapped = argparse.Namespace(**{**vars(found[0].context), "ops": ops})
            serve = lambda swapped=swapped: engines.serve(model, swapped)  # noqa: E731
            found.append(engines.Contender("ours", model, serve))  # any key that is not the yardstick's
        args = argparse.Namespace(output=3, dtype=dtype, rounds=1, torch_attention=False, profile=dtype == "float32")
        args.contenders, args.compile = ["nccl", "ours"], False
        row = llm.run_row(alone, ctx, found, 2, 3, args, lambda: False)
        right, ours, rounded, too_much, exchanged, raising = row["results"]
        assert right["status"] == ours["status"] == rounded["status"] == "ok" and ours["tokens_per_s"] > 0
        for wrong in (too_much, exchanged):
            assert (
                wrong["status"] == "WRONG"
                and "logits are off by" in wrong["notes"][0]
                and "first_eager_ms" not in wrong
            )
        assert raising["status"] == "n/a" and "no such gather" in raising["notes"][0]
        text = llm.render(
            {
                **{"model": "tiny", "layers": 1, "shortened": True, "gpu": "CPU", "world": 1, "dtype": dtype},
                **{"date": "", "versions": {}, "command": "", "allowed": {"times": 1.5, "eps": 2}, "notes": []},
                "rows": [row],
            }
        )
        assert "SHORTENED" in text and "WRONG" in text and "no such gather" in text


def test_async_tp_on_cpus_says_what_it_needs(alone):  # noqa: F811
    with iris.iris(1 << 24) as ctx:
        _, failed = engines.contenders(alone, ctx, whole_models.build("tiny", 1, ctx, torch.float32), ["async-tp"])
    assert failed == {"async-tp": "PlatformError: needs GPUs: torch has no symmetric memory on CPUs"}


@pytest.mark.parametrize("asked, dtype", [([], "float32"), (["--dtype=bfloat16"], "bfloat16")])
def test_on_cpus_the_dtype_is_float32_unless_asked_for(asked: list[str], dtype: str) -> None:
    assert llm.parse(["--device", "cpu", *asked]).dtype == dtype


def test_async_tp_alone_is_refused_on_cpus(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        llm.parse(["--device", "cpu", "--contenders", "async-tp"])
    assert end.value.code == 2 and "--contenders async-tp: expected others on CPUs" in capsys.readouterr().err


def test_ranks_that_made_different_tokens_have_no_figures(alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(llm, "same_everywhere", lambda team, engine: False)
    with iris.iris(1 << 24) as ctx:
        found, _ = engines.contenders(alone, ctx, whole_models.build("tiny", 1, ctx, torch.float32), ["nccl"])
        args = argparse.Namespace(output=3, dtype="float32", rounds=1, torch_attention=False, profile=False)
        args.contenders, args.compile = ["nccl"], False
        (result,) = llm.run_row(alone, ctx, found, 2, 3, args, lambda: False)["results"]
    assert result["status"] == "WRONG" and result["notes"] == ["ranks made different tokens"]
    assert not [key for key in result if key.endswith(("_ms", "_per_s"))], "nor in a picture"


def test_what_is_timed_forgets_no_batch(alone, monkeypatch):  # noqa: F811
    """The cache is zeroed between prompts, not in the time to a first token."""
    clock, reset, timed, forgotten = llm.clock, Engine.reset, [0], []

    def clocked(team, work):
        timed[0] += 1
        seconds = clock(team, work)
        timed[0] -= 1
        return seconds

    monkeypatch.setattr(llm, "clock", clocked)
    monkeypatch.setattr(Engine, "reset", lambda engine: forgotten.append(timed[0]) or reset(engine))
    with iris.iris(1 << 24) as ctx:
        found, _ = engines.contenders(alone, ctx, whole_models.build("tiny", 1, ctx, torch.float32), ["nccl"])
        args = argparse.Namespace(output=3, dtype="float32", rounds=1, torch_attention=False, profile=False)
        args.contenders, args.compile = ["nccl"], False
        (result,) = llm.run_row(alone, ctx, found, 2, 3, args, lambda: False)["results"]
    assert result["status"] == "ok" and result["first_eager_ms"] > 0
    assert len(forgotten) >= 3 and not any(forgotten)


def test_rows_are_batches_at_the_first_prompt_and_prompts_at_the_first_batch():
    args = llm.parse(["--ranks", "2", "--batches", "1,16", "--prompts", "128,8192", "--model", "llama-3-8b"])
    assert llm.rows_of(args) == [(1, 128), (16, 128), (1, 8192)]
    with pytest.raises(SystemExit):
        llm.parse(["--contenders", "ours,theirs"])


def test_a_model_that_is_no_name_and_no_folder_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        llm.parse(["--model", "/no/such"])
    assert "--model /no/such: expected one of llama-3-8b" in capsys.readouterr().err
