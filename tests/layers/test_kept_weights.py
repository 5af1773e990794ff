"""Weights that stay quantised in memory: their bytes, how they are made, saved and moved, and what runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import ArgumentError, CheckpointError
from iris_ops.quantised import packing
import layers
from layers import weight_storage
from layers.formats import weight_format
from layers.shard import Shard
from layers.weight_storage import FORMS, Quantised
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models, written_formats

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")

# 11 groups of 128 along K of the last product, which three ranks share as 15, 15 and 14 of 32.
WIDE: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1408, "num_attention_heads": 3, "num_key_value_heads": 3,
    "head_dim": 128, "num_hidden_layers": 1,
}  # fmt: skip
# Two to four ranks have whole groups of 32 each, and more than one.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 1,
}  # fmt: skip


def written(folder: Path, format: str, sizes: dict[str, Any] = SMALL, of: Any = written_formats._LINEAR) -> Path:
    """The folder of a quantised Llama, the same for all ranks; its numbers are in `NAME-exact`."""
    folder = agreed(folder) / "quantised"

    def write() -> None:
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.PLAIN | sizes)).eval()
        written_formats.write(model, folder, format, of)

    once(write)
    return folder


def exact_model(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-exact", dtype=torch.float32).eval()


def kept(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "storage", None), Quantised) and "weight" in module._parameters
    }


class Largest(TorchDispatchMode):
    """Records the most numbers that a tensor in 16 bits or more has, of those that ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype.is_floating_point and out.dtype.itemsize > 1:
            self.numbers = max(self.numbers, 0 if out.is_meta else out.numel())
        return out


def bytes_body(ctx, folder: str) -> tuple[int, int, int, int]:
    with pytest.MonkeyPatch.context() as patch, Largest() as largest:
        patch.setattr(weight_format, "_PIECE", 1 << 16)
        model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16)
    linears = kept(model)
    assert len(linears) == 4, model.parallel_report.widened
    stored = sum(module.weight.nbytes + module.weight_scale.nbytes for module in linears.values())
    widened = sum(2 * module.local_shape[0] * module.local_shape[1] for module in linears.values())
    rows = {row.name: row.bytes for row in model.parallel_report.rows}
    assert sum(rows[name] for name in linears) == stored
    return stored, widened, model.parallel_report.bytes, largest.numbers


@pytest.mark.parametrize("world_size", WORLDS[1:3] or WORLDS)
@pytest.mark.parametrize("format, share", [("fp8_block", 0.56), ("ct_mxfp4", 0.29), ("gptq", 0.31)])
def test_a_kept_weight_takes_its_bytes_and_is_never_widened_whole(
    tmp_path: Path, format: str, share: float, world_size: int
) -> None:
    results = run_ranks(world_size, bytes_body, str(written(tmp_path, format, WIDE)))
    for stored, widened, _, largest in results:
        assert stored <= share * widened, stored / widened
        assert largest <= 1 << 17, "a piece has at most 65536 numbers, and the vocabulary 120 rows of 384"
    if world_size != 2:  # of three kv heads one of two ranks has two
        sizes = [result[2] for result in results]
        assert max(sizes) * len(sizes) <= 1.07 * sum(sizes), sizes


# --- made while loading -----------------------------------------------------------------------------------------------

MADE = {"fp8_block": 2**-4, "int4": 0.12, "mxfp4": 0.16}


def made_body(ctx, folder: str, weights: str) -> tuple[torch.Tensor, dict[str, tuple], list]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, weights=weights, fuse=False, verify=True)
    split = models.build("leaves")
    report = layers.parallelize(split, ctx, weights=weights, fuse=False)
    assert report.bytes == model.parallel_report.bytes
    mine, same = kept(model), kept(split)
    assert len(mine) == 2 * 7 and list(mine) == list(same)
    for name, module in mine.items():
        assert module.storage.form == FORMS[weights]
        assert torch.equal(module.weight.view(torch.uint8), same[name].weight.view(torch.uint8)), name
        assert torch.equal(module.weight_scale, same[name].weight_scale), name
    parts = {
        name: (module.numbers(0, module.local_shape[0], torch.float32).cpu(), module.dim, module.parts[0].ranges)
        for name, module in mine.items()
    }
    model.save_pretrained(f"{folder}-{weights}")
    return models.logits(model, ctx.device).cpu(), parts, model.parallel_report.verified


@pytest.mark.parametrize("world_size", WORLDS[1:3] or WORLDS)
@pytest.mark.parametrize("weights", MADE)
def test_weights_are_made_from_a_plain_checkpoint_and_saved_as_they_are_used(
    tmp_path: Path, weights: str, world_size: int
) -> None:
    folder = agreed(tmp_path) / "plain"
    once(lambda: models.build("leaves").save_pretrained(folder))
    results = run_ranks(world_size, made_body, str(folder), weights)
    plain = models.build("leaves").double()
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-{weights}", dtype=torch.float32)
    state = saved.state_dict()
    for rank, (logits, parts, verified) in enumerate(results):
        assert all(row.error <= 1 for row in verified)
        assert {row.dtype for row in verified} == {"float32", FORMS[weights].name}
        for name, (numbers, dim, ranges) in parts.items():
            weight = plain.get_submodule(name).weight
            own = torch.cat([weight.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            stored = [state[f"{name}.weight"].narrow(dim, start, stop - start) for start, stop in ranges]
            assert torch.equal(numbers, torch.cat(stored, dim)), (rank, name)
            assert 0.005 < (numbers - own).norm() / own.norm() < MADE[weights], (rank, name)
        exact = models.logits(saved.double())
        assert (logits - exact).norm() <= 1e-5 * exact.norm()
        saved.float()


# --- what keeps them --------------------------------------------------------------------------------------------------


def moved_body(ctx, folder: str) -> None:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    before, logits = {k: v.clone() for k, v in model.state_dict().items()}, models.logits(model, ctx.device)
    again = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    for module in kept(again).values():
        module.weight.data.view(torch.uint8).zero_()
    again.load_state_dict(before)
    assert torch.equal(models.logits(again, ctx.device), logits)
    model.to(torch.bfloat16)
    assert all(module.dtype == torch.bfloat16 for module in kept(model).values())
    for name, value in model.state_dict().items():
        if value.dtype == before[name].dtype:
            assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
        else:
            assert not name.endswith("proj.weight"), name
    half = models.logits(model, ctx.device)
    rounds_rows = ctx.device.type == "cuda" and any(module.weight_scale.ndim == 1 for module in kept(model).values())
    allowed = (0.12 if rounds_rows else 0.03) * logits.norm()  # of channels, tensor cores take rows in fp8, too
    assert half.dtype == torch.bfloat16 and (half - logits).norm() <= allowed
    with torch.autocast(ctx.device.type, torch.bfloat16):
        assert (models.logits(again, ctx.device) - logits).norm() <= allowed
    model.save_pretrained(f"{folder}-bf16")


@two_ranks
@pytest.mark.parametrize("format", ["fp8_block", "ct_int4_32", "ct_mxfp4"])
def test_kept_weights_survive_moves_states_and_saving(tmp_path: Path, format: str, world_size: int) -> None:
    folder = written(tmp_path, format)
    run_ranks(world_size, moved_body, str(folder))
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-bf16").state_dict()
    for name, value in exact_model(folder).state_dict().items():
        assert torch.equal(saved[name], value.to(torch.bfloat16)), name


def mixed_body(ctx, folder: str) -> tuple[torch.Tensor, str, list[str]]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    return models.logits(model, ctx.device).cpu(), model.parallel_report.widened, list(kept(model))


@two_ranks
def test_a_product_of_several_formats_is_widened_and_says_so(tmp_path: Path, world_size: int) -> None:
    import re

    folder = written(tmp_path, "ct_int4_32", of=re.compile(r"(q_proj|gate_proj|up_proj|o_proj)\.weight$"))
    expected = models.logits(exact_model(folder))
    for logits, line, names in run_ranks(world_size, mixed_body, str(folder)):
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
        assert [name.rpartition(".")[2] for name in names] == ["o_proj", "gate_up_proj"]
        assert "widened to float32 (it is one product with weights in another format)" in line
        assert "3 weights kept as stored, in int4 by 32" in line


def spoiled_body(ctx, folder: str, fault: str | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "block":
            right = weight_format.block_of
            patch.setattr(weight_format, "block_of", lambda *args: right(*args).roll(1))
        if fault == "nibbles":
            store = Quantised._store
            patch.setattr(Quantised, "_store", lambda self, layer, row, codes, *rest: store(
                self, layer, row, codes.unflatten(1, (-1, 2)).flip(2).flatten(1), *rest))  # fmt: skip
        if fault == "zero":
            patch.setattr(packing.FourBits, "_numbers", lambda self, codes: codes.float() - 7)
        if fault == "bit" and ctx.cur_rank == 1:
            copy = Quantised._copy

            def wrong(self, layer, *rest):
                copy(self, layer, *rest)
                layer.weight.data[-1, 0] ^= 1 << 4

            patch.setattr(Quantised, "_copy", wrong)
        try:
            model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, verify=True)
        except CheckpointError as error:
            return str(error)
    return "" if all(row.error <= 1 for row in model.parallel_report.verified) else "?"


@pytest.mark.skipif(WORLDS == [1], reason="needs two ranks")
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_verify_notices_kept_weights_that_are_not_the_files(tmp_path: Path, world_size: int) -> None:
    folder = str(written(tmp_path, "ct_int4_32"))
    for fault in (None, "block", "nibbles", "zero", "bit"):
        for text in run_ranks(world_size, spoiled_body, folder, fault):
            assert (fault is None) == (text == ""), (fault, text)
            assert fault is None or "o_proj.weight differs from the files by" in text, text


# --- what runs them ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def served_body(ctx, folder: str) -> tuple[list, torch.Tensor]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    assert len(kept(model)) == 4
    logits = models.logits(model, ctx.device)
    prompts = models.prompt().tolist()
    tokens = layers.Engine(model, ctx, batch_size=2, max_length=16).generate(prompts, models.NEW)
    assert models.generate(model, ctx.device)[:, 7:].tolist() == tokens
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    result = compiled(models.prompt().to(ctx.device)).logits
    assert torch.equal(result, logits) if not ON_GPU else torch.allclose(result, logits, rtol=1e-2, atol=1e-2)
    return tokens, logits.cpu()


@two_ranks
@pytest.mark.parametrize("format", ["fp8_block", "ct_int4_32", "ct_mxfp4"])
@pytest.mark.some(1, on_gpus=3)
def test_generate_an_engine_and_a_compiler_run_kept_weights(tmp_path: Path, format: str, world_size: int) -> None:
    folder = written(tmp_path, format)
    whole = exact_model(folder)
    expected, single = models.generate(whole)[:, 7:].tolist(), models.logits(whole)
    for tokens, logits in run_ranks(world_size, served_body, str(folder)):
        assert tokens == expected
        assert torch.allclose(logits, single, rtol=1e-3, atol=1e-4)


def shared_tokens_body(ctx, folder: str) -> tuple[torch.Tensor, int]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, sequence_parallel=6)
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].dim()))
    logits = model(models.prompt(ctx.num_ranks).to(ctx.device)).logits.cpu()  # as many tokens on each rank
    assert seen == [2 if ctx.num_ranks > 1 else 3], "whether ranks share tokens"
    return logits, len(kept(model))


@two_ranks
@pytest.mark.parametrize("format", ["fp8_block", "ct_int4_32"])
def test_ranks_share_tokens_between_kept_weights(tmp_path: Path, format: str, world_size: int) -> None:
    folder = written(tmp_path, format)
    expected = exact_model(folder)(models.prompt(world_size)).logits
    for logits, linears in run_ranks(world_size, shared_tokens_body, str(folder)):
        assert linears == 4 and torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world_size", WORLDS[2:3] or WORLDS)
def test_a_rank_without_heads_has_kept_zeros(tmp_path: Path, world_size: int) -> None:
    folder = written(tmp_path, "ct_mxfp4", SMALL | {"num_attention_heads": 2, "num_key_value_heads": 2})
    expected = models.logits(exact_model(folder))
    for logits, _, names in run_ranks(world_size, mixed_body, str(folder)):
        assert len(names) == 4 and torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)


def invariant_body(ctx, folder: str, level: str) -> tuple[int, torch.Tensor, str]:
    ctx.invariant = level
    try:
        model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
        if level == "ranks":
            with pytest.raises(ArgumentError, match="weights is 'int4': expected None or 'widened' with invariant="):
                layers.from_pretrained(folder, ctx, dtype=torch.float32, weights="int4")
        tokens = models.prompt(4).to(ctx.device)
        whole, alone = model(tokens).logits, model(tokens[2:3]).logits
        assert torch.equal(whole[2:3], alone)
        return len(kept(model)), whole.cpu(), model.parallel_report.widened
    finally:
        ctx.invariant = None


@two_ranks
def test_levels_of_equal_bits_use_kept_weights(tmp_path: Path, world_size: int) -> None:
    folder = written(tmp_path, "ct_int4_32")
    single = exact_model(folder)(models.prompt(4)).logits
    for level in ("batch", "ranks"):
        for linears, logits, line in run_ranks(world_size, invariant_body, str(folder), level):
            assert linears == 4 and "widened" not in line
            assert torch.allclose(logits, single, rtol=1e-3, atol=1e-4)


# Heads end where the leaves of the sums over ranks do.
OF_LEAVES = SMALL | {"hidden_size": 256, "intermediate_size": 512}


def portable_body(ctx, folder: str) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    ctx.invariant = "ranks"
    try:
        made = [
            layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, weights=weights) for weights in (None, "widened")
        ]
        logits = [model(models.prompt(3).to(ctx.device)).logits.cpu() for model in made]
        return logits[0], logits[1], len(kept(made[0])), made[0].parallel_report.widened
    finally:
        ctx.invariant = None


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs several numbers of ranks")
@pytest.mark.parametrize("format, count", [
    ("ct_fp8_channel", 4), ("ct_fp8_tensor", 4), ("fp8_block", 4), ("ct_mxfp4", 4), ("ct_nvfp4", 4), ("ct_int8", 4),
    ("ct_int4_32", 4), ("ct_int4_channel", 4), ("awq", 4), ("gptq_v2", 4), ("gptq_ordered", 2),
])  # fmt: skip
@pytest.mark.some(2)
def test_kept_weights_give_the_same_bits_on_any_number_of_ranks(tmp_path: Path, format: str, count: int) -> None:
    folder = written(tmp_path, format, OF_LEAVES)
    results = [each for world_size in (1, 2, 3) for each in run_ranks(world_size, portable_body, str(folder))]
    for logits, widened, linears, line in results:
        assert linears == count and ("depends on the ranks; invariant='ranks'" in line) == (count < 4), line
        assert torch.equal(logits, results[0][0])
        assert format == "gptq_ordered" or torch.equal(logits, widened)


def refused_body(ctx) -> None:
    head = layers.ColumnParallelLinear(64, 32, gather_output=True, ctx=ctx)
    with pytest.raises(ArgumentError, match="stored in int4 by 128.*matmul_all_gather takes no scales: expected"):
        head.store_as(FORMS["int4"])
    model = models.build("tied")
    report = layers.parallelize(model, ctx, weights="int4")
    ops = {row.name: row.op for row in report.rows}
    assert "int4" not in ops["lm_head"] and "weight converted from int4 by 128" in ops["model.layers.0.mlp.down_proj"]


@two_ranks
def test_a_head_keeps_its_dtype(world_size: int) -> None:
    run_ranks(world_size, refused_body)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_pieces_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_storage, "_PIECE", 100)
    for rows, columns in [(0, 4), (7, 30), (25, 4), (3, 1000)]:
        pieces = weight_storage._pieces(rows, columns)
        assert [at for span in pieces for at in range(*span)] == list(range(rows))


def ranges_body(ctx, folder: Path) -> None:
    from tests.layers.test_formats import opened

    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    source, exact = opened(folder, "ct_fp8_channel", weight)
    ranges = (0, 64), (128, 224)
    own = torch.cat([weight[:, slice(*each)] for each in ranges], 1)
    for name, given in (("fp8", source), ("int4", weight)):
        layer = layers.RowParallelLinear(256, 48, False, ctx=ctx, device="meta", parts=(Shard(256, ranges),))
        layer.store_as(FORMS[name])
        layer.load_shard("weight", given)
        numbers = layer.numbers(0, 48, torch.float64).cpu()
        if name == "fp8":
            expected = torch.cat([exact[:, slice(*each)] for each in ranges], 1)
        else:
            expected = (
                packing.INT4.unpack(*packing.INT4.pack(*packing.INT4.quantise(own.to(ctx.device), 128), 128), 160)
                .double()
                .cpu()
            )
        assert torch.allclose(numbers, expected, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_inputs_in_several_ranges_are_kept_in_order(tmp_path: Path, world_size: int) -> None:
    folder = agreed(tmp_path)
    once(lambda: folder.mkdir(parents=True, exist_ok=True))
    run_ranks(world_size, ranges_body, folder)
