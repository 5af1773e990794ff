"""Prompts and steps from CUDA graphs: the logits and tokens of an eager engine, whatever was captured and run before.

On CPUs a fake replaces the graph: it runs the work again on separate tensors, overwrites what other graphs left in the
same memory, and refuses reads by the host. This tests the engine's part: what it passes, keeps and copies. On GPUs the
graphs are real.
"""

from __future__ import annotations

from contextlib import nullcontext

import layers
from layers.serving import graphs, lengths, prompts
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import transformers

from tests.checks import poison
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models
from tests.layers.test_compile import backend, close

pytestmark = both


class Blind(TorchDispatchMode):
    """Simulate a capture: transformers sees one, and the host cannot read a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host looks at a tensor")
        return func(*args, **kwargs or {})

    def __enter__(self):
        self.before, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
        return super().__enter__()

    def __exit__(self, *error):
        torch.cuda.is_current_stream_capturing = self.before
        return super().__exit__(*error)


class Again:
    """As `graphs.Captured`: nothing runs before a replay, and the graphs of an engine share their memory."""

    blind = Blind

    def __init__(self, work, inputs, other, random):
        self.work, self.output = work, None
        self.inputs = [None if each is None else each.clone() for each in inputs]
        self.family = [] if other is None else other.family
        self.family.append(self)

    def replay(self, inputs):
        for own, given in zip(self.inputs, inputs, strict=True):
            if own is not None:
                own.copy_(given)
        for each in self.family:
            if each.output is not None:
                poison(each.output)
        with self.blind():
            result = self.work(*self.inputs)
        self.output = result.clone() if self.output is None else self.output.copy_(result)
        return self.output


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_what_is_captured_replayed_and_forgotten() -> None:
    ran: list[str] = []

    class Counted(Again):
        def __init__(self, *args):
            ran.append("captured")
            super().__init__(*args)

    kept = graphs.Graphs(2, Counted)

    def run(key: str) -> list[str]:
        ran.clear()
        value = torch.tensor([float(ord(key))])
        result = kept.run(key, lambda x: ran.append("eager" if x is value else "replayed") or x + 1, value)
        assert result.item() == ord(key) + 1
        return list(ran)

    assert [run("a") for _ in range(3)] == [["eager"], ["captured", "replayed"], ["replayed"]]
    assert [run("b") for _ in range(2)] == [["eager"], ["captured", "replayed"]]
    assert run("a") == ["replayed"] and len(kept) == 2
    assert [run("c") for _ in range(2)] == [["eager"], ["captured", "replayed"]] and len(kept) == 2
    assert run("a") == ["replayed"], "b was used least recently"
    assert run("b") == ["eager"], "and counts as new"
    for other in range(1000, 1000 + graphs._SEEN):
        assert run(chr(other)) == ["eager"]
    assert len(kept._seen) == graphs._SEEN and run("b") == ["eager"], "work that came once is not known for ever"
    assert run("a") == ["replayed"]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_each_replay_is_followed_by_what_watches_it() -> None:
    watched: list[int] = []
    kept = graphs.Graphs(1, Again, after=lambda: watched.append(len(watched)))
    counts = []
    for _ in range(4):
        kept.run("key", lambda x: x + 1, torch.ones(1))
        counts.append(len(watched))
    assert counts == [0, 1, 2, 3], "an eager run is watched operation by operation"


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    """What is warned of, whatever handlers the process's logger has."""
    messages = []
    monkeypatch.setattr(graphs.log.logger, "warning", lambda text, *given: messages.append(text % given))
    return messages


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_what_cannot_be_captured_runs_eagerly_and_a_warning_says_so(warned: list[str]) -> None:
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    kept, never = graphs.Graphs(2, refuse), graphs.Graphs(0, refuse)
    for _ in range(3):
        assert kept.run(1, lambda x: x + 1, torch.zeros(1)).item() == 1
        assert never.run(1, lambda x: x + 1, torch.zeros(1)).item() == 1
    (text,) = warned
    assert text.endswith("stays eager: operation not permitted when stream is capturing")


def looking_body(ctx) -> None:
    """A capture in which the host looks at a tensor is invalid; memory and generators are as before then."""
    random, x = torch.Generator(ctx.device), torch.zeros(4, device=ctx.device)

    def work(x: torch.Tensor) -> torch.Tensor:
        taken = torch.ones(64 << 20, dtype=torch.uint8, device=ctx.device)
        return x + taken[0].item() + torch.empty_like(x).exponential_(generator=random)

    torch.cuda.empty_cache()
    before, kept = torch.cuda.memory_reserved(), graphs.Graphs(2)
    for _ in range(4):
        assert (kept.run(1, work, x, random=random) > 1).all()
    assert len(kept) == 0 and torch.rand(4, device=ctx.device).min() >= 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + (64 << 20)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_capture_that_fails_leaves_nothing_behind(world_size: int) -> None:
    run_ranks(world_size, looking_body)


class Compiled(Again):
    """Of compiled work, which no dispatch mode may watch."""

    blind = nullcontext


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_what_a_capture_would_compile_is_compiled_before_the_next(warned: list[str]) -> None:
    empty, ran = [True], []

    @torch.compile(backend="eager", fullgraph=True)
    def work(x):
        return x + 1 if empty else x + 2

    class Capturing(Compiled):
        def __init__(self, work, inputs, *others):
            super().__init__(work, inputs, *others)
            work(*self.inputs)
            ran.append("captured")

    kept = graphs.Graphs(2, Capturing)
    assert kept.run(1, work, torch.zeros(1)).item() == 1
    empty.clear()  # as of a cache that has its first tokens, so that the second call is compiled anew
    assert [kept.run(1, work, torch.zeros(1)).item() for _ in range(3)] == [2, 2, 2]
    assert ran == ["captured"] and len(kept) == 1
    assert not warned


def captured_engine(model, ctx, most: int, **options) -> layers.Engine:
    attention = options.pop("step_attention", ctx.device.type == "cuda")
    engine = layers.Engine(model, ctx, 2, 32, step_attention=attention, prompt_graphs=most, **options)
    if ctx.device.type == "cpu":
        kind = Compiled if options.get("compile") else Again
        engine.prompts, engine.steps = graphs.Graphs(most, kind), graphs.Graphs(2, kind)
    return engine


def drawn(seed: int, length: int) -> torch.Tensor:
    return torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(seed))


# (length, padding of the second row)
FEW = [(7, 0), (7, 2), (7, 0), (7, 3), (7, 0)]
MANY = [*FEW, (1, 0), (1, 0), (7, 1), (7, 0)]  # two are kept: of padded prompts and others, then of short ones


def alike(ctx, result: torch.Tensor, eager: torch.Tensor) -> bool:
    """As in `close`, but what is captured older transformers give a mask, so that it rounds elsewhere on CPUs too."""
    if ctx.device.type == "cpu" and not models.transformers_is(5, 23):
        return torch.allclose(result, eager, rtol=1e-5, atol=1e-5 * float(eager.abs().max()))
    return close(ctx, result, eager)


def padded(rows: list[list[int]], new: int, engine: layers.Engine) -> tuple:
    """As `generate` has them read."""
    given = prompts.padded_before(rows, new, engine.batch_size, engine.max_length)
    return tuple(None if each is None else each.to(engine.tokens.device) for each in given)


def exact_lengths(engine: layers.Engine) -> layers.Engine:
    """With it no prompt is so short that the host is the limit."""
    engine._lengths.weights = float("inf")
    return engine


def replayed_body(ctx, name: str, turns: list, options: dict, compile: bool) -> None:
    model = models.build(name)
    layers.parallelize(model, ctx, **options)
    eager = layers.Engine(model, ctx, 2, 16, graphs=False, step_attention=ctx.device.type == "cuda")
    attention = ctx.device.type == "cuda" or bool(options)  # slow in the interpreter
    compiling = backend(ctx) if compile else False
    engine = exact_lengths(captured_engine(model, ctx, 2, compile=compiling, step_attention=attention))
    other = exact_lengths(captured_engine(model, ctx, 1, cache=engine.cache))  # one cache, graphs of its own
    held = []
    for seed, (length, padding) in enumerate(turns):
        rows = drawn(seed, length).tolist()
        prompts, mask = padded([rows[0], rows[1][padding:]], 2, eager)
        if seed == 3:  # what the ops work in moves to other memory
            work = ctx.ops._calls.workspace
            before = work.flags.data_ptr()
            work.reserve(*(2 * each.nbytes + 4096 for each in (work.flags, work.staging, work.exchange)))
            assert work.flags.data_ptr() != before
            ctx.ops.forget_launches()
        built = []
        for each in (engine, eager, *([other] if len(turns) > len(FEW) and length == 7 else [])):
            each.reset()
            logits = each.prefill(prompts, mask)
            each.accept(logits)
            each.decode(1)
            built.append((logits, each.output[:, :2].tolist()))
        held.append(built)
    assert len(engine.prompts) == 2 and len(eager.prompts) == 0
    for built in held:
        for logits, tokens in built:
            assert tokens == built[1][1] and alike(ctx, logits, built[1][0]), "or a later replay has overwritten them"
    if len(turns) > len(FEW):
        options = [{"temperature": 3.0, "seed": seed} for seed in (5, 6, 5)]
        one, two = ([each.generate(models.prompt(), 3, **option) for option in options] for each in (engine, eager))
        assert one == two and one[0] == one[2] != one[1]


CASES = {
    "grouped heads": ("kv2", MANY, {}, False),
    "a window": ("sliding", FEW, {}, False),
    "tokens shared": ("kv2", FEW, {"sequence_parallel": 6}, False),
    "compiled": ("kv2", FEW, {}, True),
}


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(1)
def test_replayed_prompts_are_those_of_an_eager_engine(world_size: int, case: str) -> None:
    run_ranks(world_size, replayed_body, *CASES[case])


LENGTHS = [(5, 0), (8, 0), (7, 3), (5, 0), (1, 0), (8, 4)]


def common_body(ctx, name: str, options: dict, compile: bool) -> None:
    """Prompts of several lengths by one graph, or two where some have padding; in eights here."""
    model = models.build(name)
    layers.parallelize(model, ctx, **options)
    attention = ctx.device.type == "cuda" or bool(options)
    engine = captured_engine(model, ctx, 2, compile=backend(ctx) if compile else False, step_attention=attention)
    eager = layers.Engine(model, ctx, 2, 32, graphs=False, step_attention=ctx.device.type == "cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "length_on_grid", lambda length, least_step: -(-length // 8) * 8)
        for seed, (length, padding) in enumerate(LENGTHS):
            rows = drawn(seed, length).tolist()
            given = padded([rows[0], rows[1][padding:]], 6, eager)
            built = []
            for each in (engine, eager):
                each.reset()
                logits = each.prefill(*given)
                each.accept(logits)
                each.decode(2)
                built.append((logits, each.output[:, :3].tolist(), each.mask.clone(), int(each.filled)))
                assert {int(layer.cumulative_length) for layer in each.cache.layers} == {length + 2}
            assert built[0][1] == built[1][1] and built[0][3] == built[1][3] and torch.equal(built[0][2], built[1][2])
            room = (2e-2 if ctx.device.type == "cuda" else 1e-5) * float(built[1][0].abs().max())
            assert (built[0][0] - built[1][0]).abs().max() <= room, "rounded elsewhere, for it is longer"
    assert [key[0] for key in engine.prompts._kept] == [(2, 8), (2, 8)]


COMMON = {
    "grouped heads": ("kv2", {}, False),
    "a window": ("sliding", {}, False),
    "tokens shared": ("kv2", {"sequence_parallel": 6}, False),
    "compiled": ("kv2", {}, True),
}


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [3])
@pytest.mark.parametrize("case", COMMON)
@pytest.mark.some(1)
def test_prompts_of_several_lengths_share_a_graph(world_size: int, case: str) -> None:
    run_ranks(world_size, common_body, *COMMON[case])


class Ignores(transformers.LlamaForCausalLM):
    """Compute the logits of all tokens and ignore `logits_to_keep`."""

    def forward(self, *args, logits_to_keep=0, **kwargs):
        return super().forward(*args, **kwargs)


class FromTheEnd(transformers.LlamaForCausalLM):
    """Accept only a number for `logits_to_keep`, counted from the end."""

    def forward(self, *args, logits_to_keep=0, **kwargs):
        result = super().forward(*args, **kwargs)
        result.logits = result.logits[:, -logits_to_keep:]
        return result


KINDS = {"as transformers'": transformers.LlamaForCausalLM, "all": Ignores, "from the end": FromTheEnd}


def keeping_body(ctx, kind: str) -> None:
    torch.manual_seed(3)
    model = KINDS[kind](transformers.LlamaConfig(**models.PLAIN)).to(ctx.device).eval()
    engine, given = captured_engine(model, ctx, 2), drawn(4, 7)
    sampling = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(given.to(ctx.device), max_new_tokens=6, **sampling)[:, 7:].tolist()
    assert [engine.generate(given, 6) for _ in range(3)] == [expected] * 3
    assert len(engine.prompts) == 1


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [1])
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_keep_other_logits(world_size: int, kind: str) -> None:
    run_ranks(world_size, keeping_body, kind)
