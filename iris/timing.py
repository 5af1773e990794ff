"""`do_bench`: how long a call that all ranks make takes on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import statistics
import time
from typing import Any

import torch

from .errors import ArgumentError

_SUMMARIES: dict[str, Callable[[list[float]], Any]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "all": list,
}
_CACHE_BYTES = 256 << 20  # more than any L2 cache holds


def do_bench(
    fn: Callable[[], Any],
    barrier_fn: Callable[[], Any] = lambda: None,
    preamble_fn: Callable[[], Any] = lambda: None,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Measure calls of `fn` on this rank, one at a time, with an empty L2 cache and including the launch.

    For the time of a call in a stream of calls, and on the slowest rank, use `iris-tp bench`.

    Args:
        fn: the call to measure.
        barrier_fn: is called twice before each call, for example `ctx.barrier`.
        preamble_fn: is called before each call, outside the measured time.
        n_warmup: calls before the measurement, from 0.
        n_repeat: measured calls, from 1.
        quantiles: numbers from 0 to 1; these quantiles are returned, as a list if there are several.
        return_mode: "mean", "median", "min", "max" or "all".

    Returns:
        Milliseconds.

    Raises:
        ArgumentError: for bad arguments.
    """
    if return_mode not in _SUMMARIES:
        raise ArgumentError(f"return_mode is {return_mode!r}; expected one of {', '.join(_SUMMARIES)}")
    if type(n_repeat) is not int or n_repeat < 1 or type(n_warmup) is not int or n_warmup < 0:
        raise ArgumentError(f"n_warmup is {n_warmup!r}, n_repeat is {n_repeat!r}; expected counts from 0 and from 1")
    if quantiles is not None and not all(0 <= q <= 1 for q in quantiles):
        raise ArgumentError(f"quantiles is {quantiles!r}; expected numbers from 0 to 1")
    cuda = torch.cuda.is_available()
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda") if cuda else None
    barrier_fn()
    preamble_fn()
    fn()  # compiles
    times = [_timed(fn, barrier_fn, preamble_fn, cache) for _ in range(n_warmup + n_repeat)][n_warmup:]
    barrier_fn()
    if quantiles is None:
        return _SUMMARIES[return_mode](times)
    measured, fractions = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in (times, quantiles))
    values = torch.quantile(measured, fractions)
    return values.tolist() if len(quantiles) > 1 else values.item()


def _timed(
    fn: Callable[[], Any], barrier_fn: Callable[[], Any], preamble_fn: Callable[[], Any], cache: torch.Tensor | None
) -> float:
    barrier_fn()
    preamble_fn()
    if cache is None:
        barrier_fn()
        begin = time.perf_counter()
        fn()
        return (time.perf_counter() - begin) * 1e3
    cache.zero_()
    barrier_fn()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    fn()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended)
