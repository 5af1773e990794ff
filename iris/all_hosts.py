"""All ranks of all hosts, with the interface of one context: what layers are split over.

A context with `across` counts the ranks of its own host, because its kernels reach those only. `AllHosts(ctx)` counts
host by host, as the mesh (hosts, tp) does. Its ops and collectives add and gather over all of them; an exchange of
Python values goes through the sockets of each host first, and then from each rank to its counterparts. Whatever
concerns one rank alone, such as its device, its log and its thread, is the context's own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import pickle
from typing import TYPE_CHECKING, Any

from . import platform, registry
from .agreement import Agreement
from .ccl.hierarchical import HierarchicalCollectives
from .channel import Message
from .errors import PeerLostError
from .group import pickled

if TYPE_CHECKING:
    from .across import Across
    from .group import Ranks
    from .rank import Rank


class AllRanks:
    """The processes of all ranks of all hosts, and their exchanges: `inside` a host, and along the `line` across."""

    def __init__(self, inside: Ranks, line: Across) -> None:
        self._inside, self._line = inside, line
        self.rank, self.size = line.rank * inside.size + inside.rank, line.size * inside.size

    def all_gather(self, value: Any, what: str = "an exchange of the hosts") -> list[Any]:
        """Return every rank's `value`, any picklable object, in rank order."""
        packed = base64.b64encode(pickled(self._inside.all_gather(value, what))).decode()
        hosts = [pickle.loads(base64.b64decode(each)) for each in self._line.exchange(what, packed)]
        return [each for host in hosts for each in host]

    def exchange(self, topic: str, value: Any = None, members: Sequence[int] = (), what: str = "") -> list[Message]:
        """Return the messages of the `members`, by default all ranks, on `topic`. All ranks call it."""
        messages = [Message(each) for each in self.all_gather(value, what or topic)]
        return [messages[member] for member in members or range(self.size)]


class AllHosts:
    """All ranks of all hosts of `ctx`, which was made with `across`. Other attributes are those of `ctx`."""

    across = None  # nothing beyond these ranks

    def __init__(self, ctx: Rank) -> None:
        assert ctx.across is not None
        self.inside, self.line = ctx, ctx.across
        self.hosts = AllRanks(ctx.hosts, ctx.across)
        self.cur_rank, self.num_ranks = self.hosts.rank, self.hosts.size
        self.group_name = f"{ctx.group_name} on {ctx.across.size} hosts"
        self.agreement = None if ctx.agreement is None else Agreement(self.hosts)  # type: ignore[arg-type]
        self.ccl = HierarchicalCollectives(ctx)
        registry.add(self.group_name, self)

    @property
    def ops(self) -> Any:
        """Return the context's ops, which add over all hosts."""
        context: Any = self.inside
        return context.ops

    def check(self) -> None:
        """Raise where the context cannot be used, or another host was lost."""
        self.inside.check()
        self.line.check()

    def compare(self, call: str, members: Sequence[int] | None = None, **facts: Any) -> None:
        """Raise on all ranks where their collective calls differ, with IRIS_DEBUG=1, as `Rank.compare` does."""
        if self.agreement is None or platform.is_capturing(self.inside.device):
            return
        with self.exchanging():
            self.agreement.compare(range(self.num_ranks) if members is None else members, call, **facts)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s `value` on every rank, any picklable object."""
        self.check()
        self.inside.barrier()
        with self.exchanging():
            return self.hosts.all_gather(value if self.cur_rank == src else None, f"a broadcast from rank {src}")[src]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Enclose an exchange: a lost rank makes the context void, as after a wait in a kernel."""
        try:
            yield
        except PeerLostError:
            if self.inside.hosts.lost is None:  # another host, which `Across` has reported to the context
                raise
            with self.inside.exchanging():
                raise

    def __getattr__(self, name: str) -> Any:
        if name == "inside":  # before __init__
            raise AttributeError(name)
        return getattr(self.inside, name)
