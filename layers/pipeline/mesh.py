"""A DeviceMesh of several hosts: which dimensions it may have, and this rank's place in it.

The last dimension is "tp": the ranks of one host, which share a context. Before it "pp" divides the layers between
hosts, or "dp" gives each host a replica. This order makes the ranks of a host neighbours, as launchers number them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from iris import errors
from iris.across import Across
from iris.all_hosts import AllHosts
from iris.errors import ArgumentError, IrisError, PeerLostError, PlatformError
from iris.joining import connect
import torch
import torch.distributed as dist

from ..together import digest, one_line, safe_repr

if TYPE_CHECKING:
    from iris.context import Iris

T = TypeVar("T")

_OWN = "num_hidden_layers", "_name_or_path", "dtype", "torch_dtype"  # of a host, or compared otherwise
_MESHES = ("pp", "tp"), ("dp", "tp")
_EXPECTED = 'init_device_mesh(device, (hosts, ranks), mesh_dim_names=("pp", "tp")) or ("dp", "tp")'


@dataclass(frozen=True)
class Place:
    """This rank's place among the hosts: `kind` is "pp" or "dp", `line` its counterparts on all hosts."""

    kind: str
    line: Across

    @property
    def stages(self) -> int:
        """Return the number of stages that the layers are divided into."""
        return self.line.size if self.kind == "pp" else 1

    @property
    def stage(self) -> int:
        """Return this rank's stage, counted from 0."""
        return self.line.rank if self.kind == "pp" else 0

    def run(self, call: str, step: Callable[[], T], facts: Callable[[T], dict[str, Any]] = lambda _: {}) -> T:
        """Run `step`, a part of a `call` that every host makes, and return its result.

        Collective, with one exchange between the hosts. If `step` raises on one host, it raises on all of them. Raises
        `ArgumentError` on all of them if one of the named `facts` of the result differs.
        """
        error: Exception | None = None
        own: dict[str, str] = {}
        try:
            result = step()
            own = {name: str(value) for name, value in facts(result).items()}
        except PeerLostError as caught:  # which needs no answer of the others
            self.line.report(call, (_described(caught), own))
            raise
        except Exception as caught:
            error = caught
        try:
            reports = self.line.exchange(call, (None if error is None else _described(error), own))
        except IrisError:
            if error is None:
                raise
        if error is not None:
            raise error
        for member, (failure, _) in enumerate(reports):
            if failure is not None:
                kind, text = failure
                raise getattr(errors, kind, PlatformError)(f"host {self.line.names[member]}: {text}")
        first = reports[0][1]
        for member, (_, other) in enumerate(reports):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise ArgumentError(
                        f"{call}: {name} differs between hosts: it is {first.get(name)} on {self.line.names[0]} and "
                        f"{other.get(name)} on {self.line.names[member]}; expected the same on every rank"
                    )
        return result


def place_in(mesh: Any, ctx: Iris) -> Place | None:
    """Return this rank's place in `mesh`; None without a mesh.

    Collective over the mesh. Raises `ArgumentError` on every rank for a mesh of other dimensions, or one whose "tp" is
    not the context's group.
    """
    if mesh is None:
        return None
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "get_group"):
        raise ArgumentError(f"mesh is a {type(mesh).__name__}: expected None or a DeviceMesh, {_EXPECTED}")
    if isinstance(ctx, AllHosts):
        raise ArgumentError("mesh is given, and ctx was made with across: expected one of them")
    names = mesh.mesh_dim_names
    if not names:
        raise ArgumentError(f"mesh of shape {tuple(mesh.shape)} names no dimensions: expected {_EXPECTED}")
    if tuple(names) not in _MESHES:
        raise ArgumentError(f"mesh has the dimensions {tuple(names)}: expected {_EXPECTED}, in this order")
    inside = mesh["tp"].get_group()
    own = dist.get_process_group_ranks(ctx.hosts.group) if ctx.hosts.group else [0]
    if dist.get_process_group_ranks(inside) != own:
        raise ArgumentError(
            f"ctx has the ranks {own} and mesh['tp'] the ranks {dist.get_process_group_ranks(inside)}: expected one "
            f"group, ctx = iris.iris(group=mesh['tp'])"
        )
    return Place(names[0], connect(mesh[names[0]].get_group(), ctx))


def facts_of(model: Any, options: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return what must be the same on all hosts: the `options` of a split, and the model but for its layers' number.

    `dtype`: the model's, where its first parameter may be one that is kept in another.
    """
    held: Any = getattr(model, "config", None)
    known = held.to_dict() if hasattr(held, "to_dict") else {}
    simple = {key: each for key, each in known.items() if isinstance(each, (bool, int, float, str, dict, type(None)))}
    for key in _OWN:
        simple.pop(key, None)
    given = {name: "a function" if callable(each) else safe_repr(each) for name, each in vars(options).items()}
    configuration = f"{type(model).__name__} {digest(sorted(simple.items(), key=lambda item: item[0]))}"
    return given | {"model.config": configuration, "model.dtype": dtype or getattr(model, "dtype", None)}


def _described(error: Exception) -> tuple[str, str]:
    name = type(error).__name__
    if isinstance(error, IrisError):
        return name, str(error)
    return PlatformError.__name__, f"{name}: {one_line(error)}"
