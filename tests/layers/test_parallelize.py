"""Split Hugging Face models against the same models unsplit: logits, greedy and sampled tokens, plans, reports."""

from __future__ import annotations

from iris.errors import ArgumentError, StyleError
import layers
from layers.hf.parallelize import parallelize
from layers.serving.cache import cache_name
import pytest
import torch
from torch import nn

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = both


def ranks(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else sizes)


def split(ctx, name: str, **options) -> tuple[nn.Module, layers.Report]:
    model = models.build(name)
    return model, parallelize(model, ctx, **options)


# --- the results of the unsplit model --------------------------------------------------------------------------------


def greedy_body(ctx, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    model, _ = split(ctx, name)
    return models.logits(model, ctx.device), models.generate(model, ctx.device)


@pytest.mark.parametrize("world_size, name", models.cases([*models.CONFIGS, *models.MORE]))
@pytest.mark.some(3, on_gpus=8)
def test_logits_and_greedy_tokens_are_the_unsplit_models(world_size: int, name: str) -> None:
    results = run_ranks(world_size, greedy_body, name)
    _, _, tokens = models.expected(name)
    for result, generated in results:
        assert torch.equal(result, results[0][0]), "ranks differ"
        assert torch.equal(generated.cpu(), tokens)
    models.assert_logits(results[0][0], name)


def attention_body(ctx, name: str, attention: str, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    model = models.build(name, attention)
    parallelize(model, ctx)
    return models.logits(model, ctx.device), models.generate(model, ctx.device, padded=padded)


@ranks(3, 4)
@pytest.mark.parametrize("attention, padded", [("eager", False), ("sdpa", True)])
@pytest.mark.parametrize("name", ["kv2", "kv1", "nine_heads"])
@pytest.mark.some(2, on_gpus=3)
def test_groups_of_heads_are_right_however_attention_repeats_them(
    world_size: int, name: str, attention: str, padded: bool
) -> None:
    tokens = models.generate(models.build(name, attention), padded=padded)
    assert padded != torch.equal(tokens, models.expected(name)[2])
    for result, generated in run_ranks(world_size, attention_body, name, attention, padded):
        models.assert_logits(result, name)
        assert torch.equal(generated.cpu(), tokens)


def static_body(ctx, name: str, options: dict) -> tuple[torch.Tensor, set]:
    model, _ = split(ctx, name)
    caches = set()

    def look(module, args, kwargs):
        caches.add(type(kwargs[cache_name(model.model)]).__name__)

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    return models.generate(model, ctx.device, cache_implementation="static", **options), caches


@ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}], ids=["", "chunked"])
@pytest.mark.parametrize("name", ["plain", "kv2", "kv1"])
@pytest.mark.some(2)
def test_static_cache_gives_the_same_tokens(world_size: int, name: str, options: dict) -> None:
    for tokens, caches in run_ranks(world_size, static_body, name, options):
        assert caches == {"StaticCache"}
        assert torch.equal(tokens.cpu(), models.expected(name)[2])


def sampled_body(ctx, shared: bool, static: bool) -> torch.Tensor:
    model, _ = split(ctx, "kv2")
    options = {"do_sample": True, "temperature": 3.0, "top_k": 0}
    if static:
        options["cache_implementation"] = "static"
    torch.manual_seed(100 + ctx.cur_rank)
    if not shared:
        del model.generate  # the class's own again
    return models.generate(model, ctx.device, **options)


@ranks(1, 3)
@pytest.mark.parametrize("static", [False, True])
def test_sampled_tokens_agree_and_follow_rank_0s_seed(world_size: int, static: bool) -> None:
    results = run_ranks(world_size, sampled_body, True, static)
    assert all(torch.equal(result, results[0]) for result in results)
    if not ON_GPU:  # a GPU draws other numbers from the seed
        torch.manual_seed(100)
        whole = models.generate(models.build("kv2"), do_sample=True, temperature=3.0, top_k=0)
        assert torch.equal(results[0], whole)


def clock_body(ctx) -> None:
    model, _ = split(ctx, "plain")
    with pytest.raises(ArgumentError, match="max_time is 5"):
        models.generate(model, ctx.device, max_time=5.0)
    assert models.generate(model, ctx.device).shape == (2, 7 + models.NEW)


@ranks(2)
def test_a_stop_by_each_ranks_clock_is_refused(world_size: int) -> None:
    run_ranks(world_size, clock_body)


# --- what a split model is made of -----------------------------------------------------------------------------------


def report_body(ctx) -> tuple[layers.Report, str, int, dict]:
    model, report = split(ctx, "tied")
    head, embedding = model.lm_head.local_weight, model.model.embed_tokens.weight
    start, _ = layers.shard.chunk(121, ctx.num_ranks, ctx.cur_rank)
    assert head.data_ptr() == embedding[start:].data_ptr() or head.numel() == 0
    assert model.lm_head.weight is embedding
    assert not any(parameter.requires_grad for parameter in model.parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return report, str(report), sum(storages.values()), {r.name: r for r in report.rows}


@ranks(*WORLDS)
def test_report_says_style_shape_bytes_and_op(world_size: int) -> None:
    for rank, (report, text, nbytes, rows) in enumerate(run_ranks(world_size, report_body)):
        assert report.bytes == nbytes, "a tied head shares the embedding's memory, and nothing whole is kept"
        start, stop = layers.shard.chunk(64, world_size, rank)
        down = rows["model.layers.1.mlp.down_proj"]
        by_tokens = "matmul_all_reduce, sequence parallel matmul_reduce_scatter"
        assert (down.style, down.shape, down.op) == ("rowwise", (36, stop - start), by_tokens)
        assert down.bytes == 36 * (stop - start) * 4
        head = rows["lm_head"]
        assert head.op == "matmul_all_gather" and head.bytes == 0 and "tied to model.embed_tokens.weight" in head.style
        assert rows["model.layers.0.self_attn.qkv_proj"].op == "matmul (local), sequence parallel all_gather_matmul"
        assert rows["model.norm"].style == "replicate" and rows["model.norm"].op == "-"
        assert text.startswith(f"rank {rank} of {world_size}: {nbytes:,} bytes")
        assert "model.layers.*.mlp.down_proj  (2)" in text


# --- plans -----------------------------------------------------------------------------------------------------------

MLP_ONLY = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def plan_body(ctx, plan, by_filter: bool) -> tuple[torch.Tensor, list[str]]:
    filter_fn = (lambda name, module: ".mlp." in name) if by_filter else None
    model, report = split(ctx, "width130", plan=plan, filter_fn=filter_fn)
    return models.logits(model, ctx.device), [row.name for row in report.rows if row.op != "-"]


@ranks(2, 3)
@pytest.mark.parametrize("plan, by_filter", [(MLP_ONLY, False), ("auto", True)], ids=["dict", "filter"])
def test_a_plan_or_a_filter_splits_a_part_of_the_model(world_size: int, plan, by_filter: bool) -> None:
    for result, names in run_ranks(world_size, plan_body, plan, by_filter):
        assert len(names) == 4 and all(".mlp." in name for name in names)
        models.assert_logits(result, "width130")


class Packed(nn.Module):
    """Hold gate and up in one weight, and split the result in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(12, 2 * 33), nn.Linear(33, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


def packed(device: torch.device | str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return Packed().to(device).requires_grad_(False), torch.randn(3, 12).to(device)


def packed_body(ctx) -> torch.Tensor:
    model, x = packed()
    parallelize(model, ctx, plan={"gate_up": "packed_colwise", "down": "rowwise"})
    return model(x.to(ctx.device))


@ranks(1, 2, 3)
def test_packed_colwise_splits_both_halves(world_size: int) -> None:
    model, x = packed()
    for result in run_ranks(world_size, packed_body):
        torch.testing.assert_close(result.cpu(), model(x))


LAYER = "model.layers.*."
REFUSED = {
    "unknown style": ({LAYER + "mlp.up_proj": "diagonal"}, "'diagonal' of model.layers.0.mlp.up_proj is not supported"),
    "experts": ({LAYER + "mlp": "moe_tp_experts"}, "model.layers.0.mlp is a LlamaMLP whose parts do not add up"),
    "experts by rank": (
        {LAYER + "mlp": "grouped_gemm"},
        "'grouped_gemm' of model.layers.0.mlp is not supported: it gives",
    ),
    "sequence": ({"model.norm": "sequence_parallel"}, "'sequence_parallel' of model.norm is not supported"),
    "no linear": ({LAYER + "input_layernorm": "colwise"}, "input_layernorm is a LlamaRMSNorm"),
    "parameter": ({"model.norm.weight": "colwise"}, "model.norm.weight is a parameter, not a module"),
    "no match": ({"model.blocks.*.q": "colwise"}, "'model.blocks.\\*.q' of the plan matches no module"),
    "half an attention": ({LAYER + "self_attn.q_proj": "colwise"}, "model.layers.0.self_attn is a LlamaAttention"),
    "half an MLP": (
        {LAYER + "mlp.down_proj": "replicate", LAYER + "mlp.up_proj": "replicate"},
        "gate_proj has style 'colwise' and model.layers.0.mlp",
    ),
    "gate without up": (
        {LAYER + "mlp.up_proj": "replicate"},
        "gate_proj has style 'colwise' and model.layers.0.mlp.up_proj, of the same sizes, stays whole",
    ),
    "no values": (
        {LAYER + f"self_attn.{p}_proj": "rowwise" if p == "o" else "colwise" for p in "qko"},
        "model.layers.0.self_attn is a LlamaAttention with .* colwise q_proj, k_proj",
    ),
    "half of the words": (
        {"lm_head": "colwise"},
        "lm_head has style 'colwise', with which each rank has only its part",
    ),
    "empty": ({}, "the plan is empty: pass plan={name: style}"),
}


def refused_body(ctx, plan: dict, match: str) -> torch.Tensor:
    model = models.build("plain")
    before = [type(module) for module in model.modules()]
    with pytest.raises(StyleError, match=match):
        parallelize(model, ctx, plan={**MLP_ONLY, **plan} if plan else plan)
    assert [type(module) for module in model.modules()] == before, "a refused model is left as it was"
    parallelize(model, ctx)
    return models.logits(model, ctx.device)


@ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(world_size: int, case: str) -> None:
    for result in run_ranks(world_size, refused_body, *REFUSED[case]):
        models.assert_logits(result, "plain")


def bad_arguments_body(ctx) -> None:
    model = models.build("plain")
    with pytest.raises(ArgumentError, match="ctx is a str: expected the context"):
        layers.parallelize(torch.nn.Linear(8, 8), "tp")
    with pytest.raises(ArgumentError, match="ctx is a str: expected the context"):
        layers.from_pretrained("model", "tp")
    with pytest.raises(ArgumentError, match="path_or_id is a list: expected a str or a Path"):
        layers.from_pretrained([], ctx)
    with pytest.raises(ArgumentError, match="model is a str: expected"):
        layers.Engine("model", ctx, max_length=8)
    with pytest.raises(ArgumentError, match="model is a str"):
        parallelize("model", ctx)
    for name, value, expected in (
        ("plan", 7, "'auto' or a dict"),
        ("plan", "no", "'auto' or a dict"),
        ("fuse", "no", "a bool"),
        ("sequence_parallel", "no", "'auto', a bool"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} is {value!r}: expected {expected}"):
            parallelize(model, ctx, **{name: value})
    with pytest.raises(StyleError, match="filter_fn drops model.layers.0.mlp.down_proj"):
        parallelize(model, ctx, filter_fn=lambda name, module: "down_proj" not in name)
    parallelize(model, ctx)
    with pytest.raises(StyleError, match=f"is a .* over {ctx.num_ranks} ranks: expected a model that is not split yet"):
        parallelize(model, ctx)


@ranks(2)
def test_bad_arguments(world_size: int) -> None:
    run_ranks(world_size, bad_arguments_body)
