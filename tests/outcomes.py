"""What a body returned or raised on a rank, as it travels to the process that runs the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import io
import pickle
import traceback
from typing import Any

import iris
import torch


class _Pickler(pickle.Pickler):
    """Sends a tensor's elements, where pickle would send its whole storage: for a heap tensor, the heap."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            dense = obj.detach().cpu().contiguous().reshape(-1)
            return _rebuild, (bytearray(dense.view(torch.uint8).numpy().tobytes()), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _RankTraceback(Exception):
    """The cause of a re-raised exception: where it was raised, on which rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    error: BaseException
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickle.loads(dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Failure(error, text)

    def raise_from(self, rank: int, rest: str = "") -> None:
        raise self.error from _RankTraceback(f"on rank {rank}:\n{self.text}{rest}")


def attempt(body: Callable[..., Any], *args: Any) -> Any:
    """Return what `body` returns, or its `Failure`."""
    try:
        return body(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest.skip and pytest.fail are not Exceptions
        return Failure.of(error)


def raise_first(outcomes: list[Any]) -> None:
    """Raise what a rank raised; a lost peer only if no rank knows more, for it is the consequence.

    The cause lists what the other ranks raised.
    """
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    failures.sort(key=lambda failure: iris.errors.PeerLostError.__name__ in repr(failure[1].error))  # or what wraps it
    if failures:
        rank, failure = failures[0]
        failure.raise_from(rank, "".join(f"\non rank {also}:\n{other.text}" for also, other in failures[1:]))
