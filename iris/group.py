"""The processes that are the ranks of a context, and their exchanges on the host, each bounded (`channel.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
import io
import os
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from . import launchers, platform, transforms
from .channel import Channel, Message
from .errors import ArgumentError, IrisError, PeerLostError, PlatformError
from .rendezvous import gloo_watch, join_world

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch.distributed.device_mesh import DeviceMesh

    Members: TypeAlias = dist.ProcessGroup | DeviceMesh | None

T = TypeVar("T")


class Ranks:
    """The ranks of one context: a process group, or a world of one without any. Making it is collective.

    `name`: of the context, the same on all ranks, and unique.
    """

    def __init__(self, group: Members = None) -> None:
        self._channel: Channel | None = None
        refusal: IrisError | None = None
        limit = platform.DEFAULT_TIMEOUT_S
        try:
            with suppress(PlatformError):
                limit = platform.timeout_s()
            self.group = resolve(group, limit)
            platform.timeout_s()
        except PeerLostError:
            raise
        except IrisError as error:  # raised on the others, too, which wait for this rank
            refusal = error
            if not hasattr(self, "group"):
                self.group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.size = dist.get_world_size(self.group) if self.group else 1
        self.name = name_of(self.group.group_name if self.group else "alone")
        if self.group is not None and self.size > 1:
            self._channel = Channel(
                store_of(self.group), f"iris/{self.name}", self.rank, self.size, limit, gloo_watch(self.group, limit)
            )
        self.together("the group", lambda: _raised(refusal))

    @property
    def pids(self) -> list[int]:
        """Return the ids of the ranks' processes."""
        return self._channel.pids if self._channel else [os.getpid()]

    @property
    def lost(self) -> int | None:
        """Return a rank that this one has given up on, or None."""
        return self._channel.lost if self._channel else None

    def exchange(self, topic: str, value: Any = None, **options: Any) -> list[Message]:
        """Return the messages of all ranks on `topic`; `options` as in `Channel.exchange`."""
        return [Message(value)] if self._channel is None else self._channel.exchange(topic, value, **options)

    def all_gather(self, value: Any, what: str = "an exchange of the hosts") -> list[Any]:
        """Return every rank's `value`, any picklable object, in rank order. `what`: its name in errors."""
        return [message.value for message in self.exchange(what, value)]

    def together(self, step: str, work: Callable[[], T]) -> T:
        """Return `work()`, a step that all ranks take. If it raises on one rank, raise on all.

        That rank raises its own error, the others one of the same type, or a `PlatformError`, which names the rank.
        """
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        except BaseException as error:
            self.leave(error)
            raise
        failures = self.all_gather(None if own is None else _described(own), f"{step} of a context")
        if own is not None:
            raise own
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                raise kind(f"rank {rank}: {text}")
        return result

    def broadcast(self, value: Any, src: int) -> Any:
        """Return rank `src`'s `value`, any picklable object. Tensors on its GPU arrive on the receiver's."""
        packed: tuple[bytes | None, str | None] | None = None
        if self.rank == src:
            try:
                packed = (pickled(value), None)
            except Exception as error:
                packed = (None, f"value is a {type(value).__name__}, which cannot be pickled: {error}")
        sent = self.all_gather((src, packed), "broadcast")
        if len({source for source, _ in sent}) > 1:
            values = by_rank(dict(enumerate(source for source, _ in sent)))
            raise ArgumentError(f"broadcast: src differs between ranks: {values}; expected the same on all of them")
        data, failure = sent[src][1]
        if failure:
            named = "" if self.rank == src else f"rank {src}: "
            raise ArgumentError(f"{named}{failure}; expected a tensor, an array, numbers or another picklable object")
        if self.rank == src:
            return value
        try:
            return pickle.loads(data)
        except Exception as error:  # this process may lack a module or a device
            raise ArgumentError(f"the value of rank {src} cannot be unpickled here: {error!r}") from error

    def post(self, topic: str, value: Any) -> None:
        """Send `value` to every other rank, which may `wait_for` it, without waiting."""
        if self._channel is not None:
            self._channel.post(topic, value)

    def wait_for(self, rank: int, topic: str, timeout_s: float) -> Any:
        """Return the value that `rank` posts on `topic`. Raises `PeerLostError` where none comes in time."""
        assert self._channel is not None, "a single rank has no peers"
        return self._channel.wait_for(rank, topic, timeout_s)

    def leave(self, error: BaseException) -> None:
        """Notify the others that this rank leaves them, for `error`."""
        if self._channel is not None:
            self._channel.leave(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._channel is not None:
            self._channel.close()

    def members(self, group: Any) -> list[int]:
        """Return the ranks in this context of a subgroup: a process group, a DeviceMesh or a list of ranks."""
        if group is None:
            return list(range(self.size))
        if isinstance(group, (list, tuple)):
            ranks = [rank if type(rank) is int else -1 for rank in group]  # bool is one too
        else:
            inside = {self._global(rank): rank for rank in range(self.size)}
            ranks = [inside.get(rank, -1) for rank in dist.get_process_group_ranks(resolve(group))]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ArgumentError(f"group is {group!r}; expected distinct ranks of this context, 0 to {self.size - 1}")
        if self.rank not in ranks:
            raise ArgumentError(f"group is {group!r}; expected a group with this rank, {self.rank}, in it")
        return ranks

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group else rank


_context_counts: Counter[str] = Counter()


def name_of(group_name: str) -> str:
    """Return a unique name for a context that is about to be made on a process group.

    It is the group's, and from the second context on has a count: "0", "0.1", ...
    """
    count = _context_counts[group_name]
    _context_counts[group_name] += 1
    return f"{group_name}.{count}" if count else group_name


def by_rank(values: dict[int, Any]) -> str:
    """Return the values of ranks as messages list them, ranks with the same value together."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))}" for value, holders in ranks.items()
    )


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def _described(error: Exception) -> tuple[type, str]:
    """Return the type and the message of the error that other ranks raise."""
    if isinstance(error, IrisError):
        return type(error), str(error)
    return PlatformError, f"{type(error).__name__}: {error}"


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store that the processes of a group share."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # older torch keeps it in a map by group
        return dist.distributed_c10d._world.pg_map[group][1]


class _Pickler(pickle.Pickler):
    """A pickler that stores a tensor's elements, where pickle would store its full storage: for a tensor on the heap,
    the heap.

    Dtypes that torch writes and cannot read again, such as one-byte floats, are sent as bytes.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and transforms.any_hides(value):
            raise TypeError("a tensor has a tangent, or is batched by torch.func.vmap")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return NotImplemented
        is_full = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if not value.is_cuda and is_full and value.dtype in _PICKLED_BY_TORCH:
            return NotImplemented
        compact, kind = value.detach().cpu().clone().contiguous(), None
        if value.dtype not in _PICKLED_BY_TORCH:
            compact, kind = compact.reshape(-1).view(torch.uint8), (value.dtype, value.shape)
        return _unpack, (compact, isinstance(value, torch.nn.Parameter), value.is_cuda, value.requires_grad, kind)


_PICKLED_BY_TORCH = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def pickled(value: Any) -> bytes:
    """Return `value` pickled. Raises before other ranks wait for it where it cannot be unpickled."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    if type(value) is not torch.Tensor:  # a tensor is large, and can be unpickled
        pickle.loads(buffer.getvalue())
    return buffer.getvalue()


def _unpack(
    compact: torch.Tensor, is_parameter: bool, on_gpu: bool, requires_grad: bool, kind: tuple | None
) -> torch.Tensor:
    tensor = compact if kind is None else compact.view(kind[0]).view(kind[1])
    tensor = tensor.cuda() if on_gpu else tensor
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def resolve(group: Any, limit_s: float = platform.DEFAULT_TIMEOUT_S) -> dist.ProcessGroup | None:
    """Return the process group for a user's `group`, or of the launcher's environment; None means a world of one."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group"):  # DeviceMesh
        if group.ndim != 1:
            raise ArgumentError(
                f"group is a DeviceMesh with dimensions {group.mesh_dim_names or group.ndim}; expected one dimension, "
                f"for example mesh['tp']"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group does not contain this rank; expected a group that contains it, or None")
    if group is not None:
        raise ArgumentError(f"group is {type(group).__name__}; expected a ProcessGroup or a one-dimensional DeviceMesh")
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if launchers.adopt():
        if platform.name() != "cpu":
            torch.cuda.set_device(platform.device(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
        join_world(platform.backend(), limit_s)
        return dist.group.WORLD
    return None
