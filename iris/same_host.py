"""Check that ranks run on one host: one kernel with one namespace of process ids, and one user.

Ranks of a context map each other's memory, by process id on CPUs and through Unix sockets on GPUs. Neither crosses the
border of a host. A hostname says too little: two hosts may have the same, and two containers of one machine, which
share a kernel, may each have their own process 7. So every rank writes its `identity` to the store, and all of them
reach the same verdict before any rank opens a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
import os
from pathlib import Path
import socket
import struct
from typing import Any

from .errors import PlatformError

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_KERNEL, _PROCESSES = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"
_SAME = "kernel", "processes"  # fields of an identity that are equal on one host


def identity() -> dict[str, Any]:
    """Return the identity of this process's host, in types of JSON: its name, kernel, process namespace and user."""
    name = os.uname().nodename or "unnamed"
    fields: dict[str, Any] = {"name": name, "kernel": "", "processes": "", "user": os.geteuid()}
    with suppress(OSError):
        fields["kernel"] = Path(_KERNEL).read_text().strip()
    with suppress(OSError):
        fields["processes"] = os.readlink(_PROCESSES)
    return fields


def pid_here(entry: dict, own: dict[str, Any]) -> int | None:
    """Return the process id of a rank's `entry` in the store, if the rank runs on the host `own`, else None."""
    host = entry.get("host")
    same = isinstance(host, dict) and all(host.get(key) == own[key] for key in _SAME)
    return entry.get("pid") if same else None


def check_one_host(entries: Sequence[dict]) -> None:
    """Raise `PlatformError` where the `entries` of all ranks in the store name several hosts, or several users.

    Every rank has the same identities, so all of them raise the same.
    """
    identities = [host if isinstance(host := each.get("host"), dict) else {} for each in entries]
    hosts: dict[tuple, list[int]] = {}
    for rank, each in enumerate(identities):
        hosts.setdefault(tuple(str(each.get(key)) for key in _SAME), []).append(rank)
    if len(hosts) > 1:
        names = _names([identities[ranks[0]] for ranks in hosts.values()])
        listed = "; ".join(f"{_ranks(ranks)} on {name}" for name, ranks in zip(names, hosts.values(), strict=True))
        raise PlatformError(
            f"the ranks of a context run on {len(hosts)} hosts, which cannot map each other's memory: {listed}. "
            f"{_remedy([len(ranks) for ranks in hosts.values()])} Containers of one machine count as one host where "
            f"they share a PID namespace and a folder (TMPDIR)."
        )
    users = [each.get("user") for each in identities]
    if len(set(users)) > 1:
        raise PlatformError(f"the ranks run as users {users}; expected one user, who may map the memory of all ranks")


def unreachable(entries: Sequence[dict], rank: int) -> str:
    """Return why `rank`, this one, sees no socket at another one's path, or an empty text where it sees all."""
    for peer, entry in enumerate(entries):
        try:
            os.lstat(str(entry["path"]))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            names = _names([entry["host"], entries[rank]["host"]])
            return (
                f"rank {rank} on {names[1]} does not see {entry['path']} of rank {peer} on {names[0]} ({reason}), so "
                f"they share no folder and cannot connect. Expected a folder that all ranks of a context see: set "
                f"TMPDIR to one. {_remedy([])}"
            )
    return ""


def check_process(peer: socket.socket, rank: int, pid: int) -> None:
    """Raise `PlatformError` unless the process at the other end of a Unix socket is `pid`, run by this user."""
    there, uid, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if (there, uid) != (pid, os.geteuid()):
        raise PlatformError(
            f"rank {rank}'s socket belongs to process {there} of user {uid}; expected {pid} of user {os.geteuid()}. "
            f"All ranks must run on one host, as one user and in one process namespace."
        )


def _remedy(sizes: Sequence[int]) -> str:
    """Return the advice for ranks on several hosts with `sizes` ranks each."""
    hosts, ranks = (len(sizes), sizes[0]) if sizes and len(set(sizes)) == 1 else ("hosts", "ranks of a host")
    return (
        f"On several hosts expected a context on each: mesh = init_device_mesh(device, ({hosts}, {ranks}), "
        f'mesh_dim_names=("pp", "tp")), then iris.iris(group=mesh["tp"]) (docs/guides/several-hosts.md).'
    )


def _names(hosts: Sequence[dict]) -> list[str]:
    """Return the hostnames, followed by kernel and namespace where several hosts have the same name."""
    names = [str(host.get("name")) for host in hosts]
    marks = [f"kernel {str(host.get('kernel'))[:8]}, {host.get('processes')}" for host in hosts]
    return [f"{name} ({mark})" if names.count(name) > 1 else name for name, mark in zip(names, marks, strict=True)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
