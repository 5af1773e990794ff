"""Run repeated work: eager the first time, captured in a CUDA graph the second, replayed from then on.

The eager run does the compiling and allocating that a capture could not. Work that comes once is never captured. The
`most` graphs used last stay. They share their memory: a replay overwrites another graph's output, so a result must
be used, or copied, before the next work runs. The memory stays reserved until all of them are gone.

A capture must not compile anything. Work that would compile is run eagerly once more, and captured the next time. If a
capture fails for another reason, no other is tried, and a warning reports it: work without a graph runs eagerly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from iris import log
from iris.launch.graphs import abandon
import torch

from .pieces import Pieces

_SEEN = 256  # keys of work that came once
_STANCE: Final = "fail_on_recompile"  # torch's error names it

Work = Callable[..., torch.Tensor]


class Captured:
    """`work` as graphs (`pieces`) on tensors of its own, copies of `inputs`, and on the memory of `other`.

    Its random numbers come from `random`.
    """

    def __init__(self, work: Work, inputs: tuple, other: Captured | None, random: torch.Generator | None):
        self.inputs = [None if each is None else each.clone() for each in inputs]
        self.pool: Any = torch.cuda.graph_pool_handle() if other is None else other.pool
        self.pieces = Pieces(partial(self._begin, random))
        # The outer block leads back to the current stream even where a capture fails.
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), self.pieces:
                self.output = work(*self.inputs)
        except BaseException:
            abandon(torch.device("cuda", torch.cuda.current_device()), self.pool, random)
            raise
        # When a capture begins, torch writes the generator's state tensors in the capturing stream; a replay writes
        # them anew, in the current one.
        assert torch.cuda.graph.default_capture_stream is not None
        torch.cuda.current_stream().wait_stream(torch.cuda.graph.default_capture_stream)

    def _begin(self, random: torch.Generator | None) -> tuple[AbstractContextManager, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        if random is not None:
            graph.register_generator_state(random)
        # Thread-local: other threads (NCCL's watchdog) may use the device meanwhile.
        return torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"), graph.replay

    def replay(self, inputs: tuple) -> torch.Tensor:
        """Return the result for `inputs`, of the shapes and dtypes of the captured ones."""
        for own, given in zip(self.inputs, inputs, strict=True):
            if own is not None:
                own.copy_(given)
        self.pieces.replay()
        return self.output


class Graphs:
    """At most `most` pieces of captured work, each under a key; 0: everything runs eagerly.

    `around` returns the context manager in which work is captured. `after` is called after each replay.
    """

    def __init__(
        self,
        most: int,
        capture: type[Captured] = Captured,
        around: Callable[[], AbstractContextManager] = nullcontext,
        after: Callable[[], None] | None = None,
    ):
        self.most, self._capture, self._around, self._after, self._failed = most, capture, around, after, False
        self._seen: OrderedDict[Hashable, bool] = OrderedDict()  # and whether a capture would have compiled
        self._kept: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(
        self, key: Hashable, work: Work, *inputs: torch.Tensor | None, random: torch.Generator | None = None
    ) -> torch.Tensor:
        """Run `work(*inputs)`, which launches the same for the same key. `random`: the generator that it draws from."""
        if self.most and key not in self._kept and not self._failed:
            if key in self._seen:
                self._add(key, work, inputs, random)
            else:
                _remember(self._seen, key, False, _SEEN)
        if key not in self._kept:
            return work(*inputs)
        self._kept.move_to_end(key)
        output = self._kept[key].replay(inputs)
        if self._after is not None:
            self._after()
        return output

    def _add(self, key: Hashable, work: Work, inputs: tuple, random: torch.Generator | None) -> None:
        try:
            with _compiling_nothing(), self._around():
                graph = self._capture(work, inputs, next(iter(self._kept.values()), None), random)
        except RuntimeError as error:
            if _STANCE in str(error) and not self._seen[key]:
                self._seen[key] = True
                return
            reason = str(error).strip().partition("\n")[0]
            log.logger.warning("what an engine runs is not captured in a CUDA graph, it stays eager: %s", reason)
            self._failed = True
        else:
            del self._seen[key]
            _remember(self._kept, key, graph, self.most)


def _compiling_nothing() -> AbstractContextManager:
    """Return a block in which compiling is an error, unless the user's own stance is already stricter."""
    own = torch._dynamo.eval_frame._stance.stance
    return torch.compiler.set_stance(_STANCE) if own == "default" else nullcontext()


def _remember(known: OrderedDict, key: Hashable, value: object, most: int) -> None:
    """Add the newest entry; drop the oldest beyond `most`."""
    known[key] = value
    while len(known) > most:
        known.popitem(last=False)
