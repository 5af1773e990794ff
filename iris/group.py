"""Which processes are the ranks of a context, and the few host collectives that setting up needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
import io
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist

from . import platform
from .errors import ArgumentError, PeerLostError


class Ranks:
    """The ranks of one context: a process group, or a world of one without any."""

    def __init__(self, group: Any = None) -> None:
        self.group = _resolve(group)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.size = dist.get_world_size(self.group) if self.group else 1
        self.name = self.group.group_name if self.group else "alone"

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, any picklable object, in rank order."""
        if self.group is None:
            return [value]
        everyone: list[Any] = [None] * self.size
        with _peers_answer():
            dist.all_gather_object(everyone, value, self.group)
        return everyone

    def broadcast(self, value: Any, src: int) -> Any:
        """Rank `src`'s `value`, any picklable object. Tensors on its GPU arrive on the receiver's."""
        if self.group is None:
            return value
        box: list[Any] = [None]
        if self.rank == src:
            try:
                box = [(_pickled(value), None)]
            except Exception as error:
                box = [(None, f"value is a {type(value).__name__}, which cannot be pickled: {error}")]
        with _peers_answer():
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, src), group=self.group)
        data, failure = box[0]
        if failure:
            raise ArgumentError(f"{failure}; expected a tensor, an array, numbers or another picklable object")
        if self.rank == src:
            return value
        try:
            return pickle.loads(data)
        except Exception as error:  # what another process lacks: a module, a device
            raise ArgumentError(f"what rank {src} sent cannot be made here: {error!r}") from error

    def tell(self, topic: str, value: Any) -> None:
        """Leaves `value` in the group's store for whoever asks for it; waits for nobody."""
        if self.group is not None:
            self.group.get_group_store().set(f"iris/{topic}/{self.rank}", pickle.dumps(value))

    def ask(self, topic: str, rank: int, timeout_s: float) -> Any:
        """What `rank` has left, or leaves in time, about `topic`. Raises `PeerLostError` where it does not."""
        try:
            store = self.group.get_group_store()
            key = f"iris/{topic}/{rank}"
            store.wait([key], timedelta(seconds=timeout_s))
            return pickle.loads(store.get(key))
        except RuntimeError as error:
            raise PeerLostError(f"rank {rank} said nothing of {topic}: {str(error).splitlines()[0]}") from None

    def members(self, group: Any) -> list[int]:
        """The ranks, counted in this context, of a subgroup: a process group, a DeviceMesh or a list of ranks."""
        if group is None:
            return list(range(self.size))
        if isinstance(group, (list, tuple)):
            ranks = [rank if type(rank) is int else -1 for rank in group]  # bool is one too
        else:
            inside = {self._global(rank): rank for rank in range(self.size)}
            ranks = [inside.get(rank, -1) for rank in dist.get_process_group_ranks(_resolve(group))]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ArgumentError(f"group is {group!r}; expected distinct ranks of this context, 0 to {self.size - 1}")
        if self.rank not in ranks:
            raise ArgumentError(f"group is {group!r}; expected a group with this rank, {self.rank}, in it")
        return ranks

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group else rank


@contextmanager
def _peers_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a rank ended or did not answer: {str(error).splitlines()[0]}") from None


class _Pickler(pickle.Pickler):
    """Takes a tensor's elements where pickle would take its whole storage: for a tensor on the heap, the heap.

    And where torch writes what it cannot read again, as of dtypes of eight bits: these go as bytes.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return NotImplemented
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if not value.is_cuda and whole and value.dtype in _PICKLED_BY_TORCH:
            return NotImplemented
        compact, kind = value.detach().cpu().clone().contiguous(), None
        if value.dtype not in _PICKLED_BY_TORCH:
            compact, kind = compact.reshape(-1).view(torch.uint8), (value.dtype, value.shape)
        return _unpack, (compact, isinstance(value, torch.nn.Parameter), value.is_cuda, value.requires_grad, kind)


_PICKLED_BY_TORCH = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def _pickled(value: Any) -> bytes:
    """`value`, which can be made again: what cannot is known before anybody waits for it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    if type(value) is not torch.Tensor:  # which is large, and can
        pickle.loads(buffer.getvalue())
    return buffer.getvalue()


def _unpack(
    compact: torch.Tensor, is_parameter: bool, on_gpu: bool, requires_grad: bool, kind: tuple | None
) -> torch.Tensor:
    tensor = compact if kind is None else compact.view(kind[0]).view(kind[1])
    tensor = tensor.cuda() if on_gpu else tensor
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _resolve(group: Any) -> dist.ProcessGroup | None:
    """A process group from what the user gave, or from the environment; None is a world of one."""
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
        raise ArgumentError("group is one without this rank; expected a group that it is in, or None")
    if group is not None:
        raise ArgumentError(f"group is {type(group).__name__}; expected a ProcessGroup or a one-dimensional DeviceMesh")
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if platform.name() != "cpu":
            torch.cuda.set_device(platform.device(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
        dist.init_process_group(platform.backend())
        return dist.group.WORLD
    return None
