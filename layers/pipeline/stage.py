"""Between the stages of a divided model: hidden states go on to the next stage, logits come back to all.

Every rank of every stage runs the model's own forward, `generate()` and engine, on the same tokens. Only three places
differ. The first layer of a later stage takes the hidden states that the stage before sends; the last layer of an
earlier stage sends its own; the head's logits go from the last stage to all others. So every rank chooses the same next
token by the same bits, and nothing else has to be agreed on. Rank i of a stage talks to rank i of the others: ranks of
a stage hold the same hidden states, so each border is crossed by as many streams as a host has ranks.

Stages take turns on one batch, because a token depends on all layers of the one before. Schedules that fill a pipeline
with several batches (torch.distributed.pipelining) cut each batch into microbatches and keep no cache between calls.
They fit training and scoring, not generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from iris.all_hosts import AllHosts
from iris.errors import ArgumentError
from iris_ops.recording import is_recording
import torch
from torch import nn

from ..serving.pieces import between_graphs
from .cut import NoHead, Part
from .mesh import Place

T = TypeVar("T")

_ATTRIBUTE = "iris_place"


def place_of(model: Any) -> Place | None:
    """Return the place among the hosts of a model that was split on a mesh; None for any other model."""
    return getattr(model, _ATTRIBUTE, None)


def run_on_stages(model: Any, call: str, step: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
    """Run `step` and return its result, compared between the stages of `model` as by `Place.run`.

    For a model without stages, just run it. Replicas make separate calls, which are not compared.
    """
    place = place_of(model)
    return step() if place is None or place.stages == 1 else place.run(call, step, facts)


def connect(model: Any, place: Place, part: Part | None) -> None:
    """Add what crosses the borders of this stage to `model`, which has the layers of `part`. Collective."""
    setattr(model, _ATTRIBUTE, place)
    if part is None or place.stages == 1:
        return
    line, stage, last = place.line, place.stage, place.stages - 1
    layers: Any = model.get_submodule(part.stack)
    head = model.get_output_embeddings()
    kinds = line.exchange("the logits' dtype", None if stage < last else str(_dtype(model)).removeprefix("torch."))
    if stage > 0:
        layers[0].register_forward_pre_hook(_Receive(place), with_kwargs=True)
    if stage < last:
        layers[-1].register_forward_hook(_Send(place))
    head.register_forward_hook(_ShareLogits(place, getattr(torch, kinds[last])))
    model.register_forward_pre_hook(_check_outputs, with_kwargs=True)


def save_refusal(model: Any) -> str | None:
    """Return why `model`, which has the layers of one stage only, cannot be saved; None for any other model."""
    place = place_of(model)
    if place is None or place.stages == 1:
        return None
    return (
        f"model has the layers of stage {place.stage} of {place.stages} only: expected one without a 'pp' in its mesh; "
        "the folder that it was read from has all layers"
    )


def settle(model: Any, ctx: Any) -> None:
    """Wait until all transfers of `model` between hosts have ended. Raises `PeerLostError` where a host was lost."""
    place = place_of(model)
    line = ctx.line if isinstance(ctx, AllHosts) else place.line if place is not None and place.stages > 1 else None
    if line is not None:
        line.settle()


def share_generators(model: Any, device: torch.device) -> None:
    """Give this rank the states of the random generators of its counterpart on stage 0. Collective."""
    place = place_of(model)
    if place is None or place.stages == 1:
        return
    on_gpu = device.type == "cuda"
    state = torch.get_rng_state()
    own = torch.cuda.get_rng_state(device) if on_gpu else None
    cpu, gpu = place.line.exchange(
        "the states of random generators",
        [bytes(each.numpy()).hex() if each is not None else None for each in (state, own)] if not place.stage else None,
    )[0]
    torch.set_rng_state(_bytes_of(cpu))
    if on_gpu:
        torch.cuda.set_rng_state(_bytes_of(gpu), device)


def share_seed(model: Any, seed: int | None) -> int | None:
    """Return the seed of stage 0 on every stage; if it is None, torch's generator draws one. Collective."""
    place = place_of(model)
    if place is None or place.stages == 1:
        return seed
    drawn = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None and not place.stage else seed
    return place.line.exchange("the seed of samples", drawn)[0]


def _check_outputs(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise, before a forward, for outputs of all layers, because this rank has those of its stage only."""
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name) or (kwargs.get(name) is None and getattr(model.config, name, False)):
            raise ArgumentError(f"{name} is True, and the model's layers are divided between hosts: expected False")


class _Receive:
    """Before the first layer: the hidden states of the stage before, in place of those that come in."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if is_recording() or hidden.is_meta:
            return None
        hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        line, before = self.place.line, self.place.stage - 1
        between_graphs(lambda: line.receive(hidden, before, "receiving hidden states"))
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


class _Send:
    """After the last layer: its hidden states go to the next stage."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not is_recording() and not hidden.is_meta:
            line, own, following = self.place.line, hidden.contiguous(), self.place.stage + 1
            between_graphs(lambda: line.send(own, following, "sending hidden states"))


class _ShareLogits:
    """After the head: the last stage sends its logits to all others, which return them as theirs."""

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self.place, self.dtype = place, dtype

    def __call__(self, module: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
        if is_recording() or logits.is_meta:
            return logits
        line, last = self.place.line, self.place.stages - 1
        if isinstance(module, NoHead):
            logits = torch.empty(logits.shape, dtype=self.dtype, device=logits.device)
            between_graphs(lambda: line.receive(logits, last, "receiving logits"))
            return logits
        own = logits.contiguous()

        def send() -> None:
            for stage in range(last):
                line.send(own, stage, "sending logits")

        between_graphs(send)
        return logits


def _dtype(model: Any) -> torch.dtype:
    return next(model.get_output_embeddings().parameters()).dtype


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
