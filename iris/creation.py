"""What ranks request of a context, compared before anything is allocated: all ranks continue, or all raise an error."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from . import agreement, aliases, invariance, platform
from .errors import ArgumentError, IrisError, PlatformError
from .group import by_rank
from .launch import graphs
from .machines import machine_at

_MAX_HEAP = 1 << 46


@dataclass(frozen=True)
class Request:
    """The arguments of a rank's request for a context; ranks compare them before anything is allocated."""

    gpu: str | None
    heap_size: str
    allocator: str
    debug: str
    invariant: str
    rates: tuple[str, str]
    """A digest of what plans depend on, and its description."""
    refusal: IrisError | None


def refusal(heap_size: Any, copy_engine: Any, invariant: Any, across: Any) -> IrisError | None:
    """Return the error in this rank's arguments and environment; all ranks get it, so that none waits for this one."""
    if isinstance(heap_size, bool) or not isinstance(heap_size, Integral) or not 0 < int(heap_size) <= _MAX_HEAP:
        return ArgumentError(f"heap_size is {heap_size!r}; expected a number of bytes from 1 to {_MAX_HEAP}")
    if copy_engine is not None:
        return ArgumentError(
            f"copy_engine is {copy_engine!r}; expected None: kernels here cannot drive copy engines, and ctx.put uses "
            f"those of the GPU without it ({aliases.PAGE})"
        )
    if invariant is not None and across is not None and not invariance.refusal(invariant):
        return ArgumentError(
            f"invariant is {invariant!r} with across: expected None, because the backend orders sums across hosts"
        )
    try:
        agreement.enabled()
        graphs.enabled()
    except PlatformError as error:
        return error
    return invariance.refusal(invariant)


def requested(
    device: torch.device, gpu: str | None, settings: tuple[str, str, str, str], refused: IrisError | None
) -> Request:
    """Return this rank's request. `settings`: heap_size, allocator, debug, invariant; `refused`: what is wrong."""
    rates, unusable = _rates(device)
    return Request(gpu, *settings, rates, refused or unusable)


def _rates(device: torch.device) -> tuple[tuple[str, str], IrisError | None]:
    """Return the digest of this rank's rates with their description, or the error of a table that cannot be used."""
    try:
        machine = machine_at(device)
    except PlatformError as error:
        return ("", ""), error
    return (machine.digest, f"{machine.name}, rates {machine.source}"), None


def agree(requests: list[Request]) -> None:
    """Raise an error on every rank if one rank cannot continue, or if two requests contradict each other."""
    for error in filter(None, (request.refusal for request in requests)):
        raise error
    fields = ("heap_size", "heap_size"), ("allocator", "allocator"), ("invariant", "invariant")
    for name, key in (*fields, (agreement.ENV_DEBUG, "debug")):
        values = [getattr(request, key) for request in requests]
        if len(set(values)) > 1:
            raise ArgumentError(f"{name} differs between ranks: {', '.join(values)}; expected the same on all")
    if len({digest for digest, _ in (request.rates for request in requests)}) > 1:
        rates = by_rank({rank: f"{text} ({digest})" for rank, (digest, text) in enumerate(r.rates for r in requests)})
        raise PlatformError(
            f"rates differ between ranks, and so would plans: {rates}; expected GPUs of one kind, and on all ranks the "
            "same table of measured rates, or none: copy its file (iris-tp calibrate), or delete it"
        )
    gpus = [request.gpu for request in requests if request.gpu]
    if len(set(gpus)) < len(gpus) and not platform.sharing_gpus():
        raise PlatformError(
            f"two ranks use the same GPU: {gpus}; start one rank a GPU (torchrun sets LOCAL_RANK), or let them take "
            f"turns on it with {platform.ENV_SHARE_GPUS}=1, which is slow"
        )
