"""Generation in a worker thread, as transformers' streaming idiom has it."""

from __future__ import annotations

import threading

import iris
from iris.errors import ThreadError
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models
from tests.processes import run_fresh

transformers = pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


class Collecting(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.seen, self.ended = [], False

    def put(self, value) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def thread_body(ctx) -> None:
    model = models.build("plain")
    layers.parallelize(model, ctx)
    ids = models.prompt(1).to(ctx.device)
    options = {"max_new_tokens": 2, "do_sample": False}
    expected = model.generate(ids, **options)
    engine = layers.Engine(model, ctx, 1, 16)
    failures = []

    def work(take_over: bool) -> None:
        torch.set_num_threads(1)
        try:
            if take_over:
                ctx.take_over()
            streamer = Collecting()
            model.generate(ids, streamer=streamer, **options)
            assert streamer.ended and streamer.seen == expected[0].tolist()
            assert engine.generate(ids, 2) == [expected[0, 7:].tolist()]
            model(ids)
        except BaseException as error:
            failures.append(error)

    for take_over in (False, True):
        thread = threading.Thread(target=work, args=(take_over,))
        thread.start()
        thread.join()
    assert [type(each) for each in failures] == [ThreadError], "only a forward needs the context for good"
    with pytest.raises(ThreadError):
        model(ids)
    assert torch.equal(model.generate(ids, **options), expected), "which may borrow it, too"
    with pytest.raises(ThreadError):
        model(ids)
    ctx.take_over()
    model(ids)


def test_a_worker_thread_generates(world_size: int) -> None:
    run_ranks(world_size, thread_body)


class Waiting(Collecting):
    """Lets another thread try to generate while this one does."""

    def __init__(self, meanwhile) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def put(self, value) -> None:
        super().put(value)
        if len(self.seen) == 8:
            self.meanwhile()


def two_threads_body(ctx) -> None:
    model = models.build("plain")
    layers.parallelize(model, ctx)
    ids, options = models.prompt(1).to(ctx.device), {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **options)
    outcomes = []

    def other() -> None:
        second = Collecting()
        for call in (lambda: model.generate(ids, streamer=second, **options), ctx.take_over):
            try:
                call()
            except ThreadError as error:
                outcomes.append((str(error)[:12], second.ended))

    def meanwhile() -> None:
        thread = threading.Thread(target=other, name="other")
        thread.start()
        thread.join()

    assert torch.equal(model.generate(ids, streamer=Waiting(meanwhile), **options), expected)
    assert outcomes == [("thread 'othe", True)] * 2, outcomes
    assert torch.equal(model.generate(ids, **options), expected)


def test_a_second_thread_is_refused_and_its_streamer_ends(world_size: int) -> None:
    run_ranks(world_size, two_threads_body)


class Numbers:
    """A tokenizer, as far as streamers need one."""

    def decode(self, tokens, **_) -> str:
        return "".join(f"{int(token)} " for token in tokens)


def streamed(rank: int, world_size: int, way: str) -> list[str]:
    """transformers' idiom, as its documentation writes it: rank 0 streams, the others generate."""
    pieces = []
    with iris.iris(1 << 26) as ctx:
        model = models.build("plain")
        layers.parallelize(model, ctx)
        inputs = {"input_ids": models.prompt(1).to(ctx.device)}
        streamer = transformers.TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60) if rank == 0 else None
        options = dict(inputs, streamer=streamer, max_new_tokens=4, do_sample=False)
        if way == "an error":
            options["max_time"] = 1.0

        def taking_over(**kwargs) -> None:
            ctx.take_over()
            model.generate(**kwargs)

        thread = threading.Thread(target=taking_over if way == "taken over" else model.generate, kwargs=options)
        thread.start()
        if streamer is not None:
            pieces.extend(streamer)
            if way == "plain":
                ctx.barrier()  # the context is this thread's again once the streamer has ended
        else:
            thread.join()
            if way == "plain":
                ctx.barrier()
    return pieces


@pytest.mark.parametrize("way", ["plain", "taken over", "an error"])
def test_a_text_is_streamed_from_a_thread(world_size: int, way: str) -> None:
    if UNDER_TORCHRUN:
        pytest.skip("makes contexts of its own")
    ends = run_fresh(2, streamed, way, env={"IRIS_TIMEOUT": "30"}, timeout=90)
    assert [end.exitcode for end in ends] == [0, 0], [end.traceback for end in ends]
    new = models.build("plain").generate(models.prompt(1), max_new_tokens=4, do_sample=False)[0, 7:]
    assert "".join(ends[0].result) == ("" if way == "an error" else Numbers().decode(new))
