"""Several hosts on one machine: each is a set of Linux namespaces with processes of its own and a link to the others.

`run_hosts((2, 2), body, *args)` calls `body(rank, world_size, *args)` in four processes on two hosts, under torchrun's
variables, and returns how each ended, in rank order. A host has its own network, process ids, System V memory, hostname
and mounts, so processes of two hosts share no memory and see no process of each other. Files are shared, as on hosts
with a network file system, unless `own_tmp` gives each host a /tmp of its own.

Hosts are forked from the server of `tests/processes.py`. A host process leaves its namespaces. Its first child is the
host's init, process 1, which forks the ranks. When a host's init ends, the kernel ends all its ranks.

A process that is no host has the switch, a bridge, in a network of its own, and from it a veth pair to each host. The
bridge may be no host's end: it changes its hardware address when the port that it was taken from goes with a host, and
what the others send to that address is lost. Nor may it go with a host, as all links would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
import ctypes
import functools
from multiprocessing.connection import Connection, wait
import os
import pickle
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.outcomes import Failure, attempt, dumps
from tests.processes import ROOT, Ended, forkserver, free_port, patient, prepare_process

_FLAGS = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "mnt": 0x00020000, "pid": 0x20000000}
ALL = tuple(_FLAGS)
_BRIDGE, _LINK, _SUBNET, _PORT = "iris0", "iris1", "10.77.0", 29400  # of the switch, of a host
_MS_BIND, _MS_REC_PRIVATE = 0x1000, 0x4000 | 0x40000


@functools.cache
def unavailable() -> str:
    """Why this machine cannot make such hosts; empty where it can."""
    ip = f"ip link add {_BRIDGE} type bridge && ip link add {_LINK} type veth peer name iris2"
    command = ["unshare", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", ip]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be made: {error}"
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def needs_namespaces() -> pytest.MarkDecorator:
    """The mark of a module whose tests run on such hosts."""
    reason = unavailable()
    return pytest.mark.skipif(bool(reason), reason=reason or "namespaces can be made")


def run_hosts(
    ranks: Sequence[int],
    body: Callable[..., Any],
    *args: Any,
    kinds: Sequence[str] = ALL,
    names: Sequence[str] | None = None,
    own_tmp: bool = False,
    env: dict[str, str] | None = None,
    timeout: float = 90.0,
) -> list[Ended]:
    """Return how `body(rank, world_size, *args)` ended, in rank order; `ranks` has the number of ranks of each host.

    `kinds`: the namespaces that are the host's own; `names`: the hostnames. A rank that does not end in time is killed.
    """
    context, size = forkserver(), sum(ranks)
    names = names or [f"host{chr(ord('a') + index)}" for index in range(len(ranks))]
    port = str(_PORT if "net" in kinds else free_port())
    message = dumps((body, args))
    hosts, controls, replies = [], [], []
    first = 0
    for index, count in enumerate(ranks):
        ours, theirs = context.Pipe()
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        variables = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(index), **(env or {})}
        variables |= {"MASTER_ADDR": f"{_SUBNET}.1" if "net" in kinds else "127.0.0.1", "MASTER_PORT": port}
        if "net" in kinds:
            variables["GLOO_SOCKET_IFNAME"] = _LINK
        place = _Place(index, first, tuple(kinds), names[index], own_tmp, variables)
        process = context.Process(target=_host, args=(place, message, theirs, [end for _, end in pipes]), daemon=True)
        process.start()
        theirs.close()
        for _, end in pipes:
            end.close()
        hosts.append(process)
        controls.append(ours)
        replies += [reader for reader, _ in pipes]
        first += count
    try:
        pids = [control.recv() for control in controls]
        if "net" in kinds:
            ours, theirs = context.Pipe()
            process = context.Process(target=_switch, args=(pids, theirs), daemon=True)
            process.start()
            theirs.close()
            hosts.append(process)
            controls.insert(0, ours)  # the links are there before hosts use their ends
        for control in controls:
            control.send("link")
            if failure := control.recv():
                raise RuntimeError(failure)
        for control in controls:
            control.send("go")
        return _collect(replies, time.monotonic() + patient(timeout))
    finally:
        for control in controls:
            control.close()
        for process in hosts:
            process.join(3)
            process.kill()
            process.join(3)


def _collect(replies: list[Connection], deadline: float) -> list[Ended]:
    ended: list[Ended] = [Ended(None)] * len(replies)
    running = dict(zip(replies, range(len(replies)), strict=True))
    while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for reply in ready:
            rank = running.pop(reply)
            try:
                outcome = pickle.loads(reply.recv_bytes())
            except (EOFError, OSError):  # killed
                ended[rank] = Ended(-signal.SIGKILL)
                continue
            failed = isinstance(outcome, Failure)
            ended[rank] = Ended(1, None, outcome.error, outcome.text) if failed else Ended(0, outcome)
    for reply in replies:
        reply.close()
    return ended


class _Place:
    """Which host it is, and what its ranks have in their environment."""

    def __init__(
        self, index: int, first: int, kinds: tuple[str, ...], name: str, own_tmp: bool, variables: dict[str, str]
    ) -> None:
        self.index, self.first, self.kinds, self.name = index, first, kinds, name
        self.own_tmp, self.variables = own_tmp, variables


def _host(place: _Place, message: bytes, control: Connection, replies: list[Connection]) -> None:
    prepare_process()
    libc = ctypes.CDLL(None, use_errno=True)
    _unshare(libc, [kind for kind in place.kinds if kind != "pid"])
    if "uts" in place.kinds:
        encoded = place.name.encode()
        libc.sethostname(encoded, len(encoded))
    if "mnt" in place.kinds:
        libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    control.send(os.getpid())
    address = f"ip addr add {_SUBNET}.{place.index + 1}/24 dev {_LINK}"
    commands = ["ip link set lo up", address, f"ip link set {_LINK} up"]
    if not _obey(control, commands if "net" in place.kinds else []):
        return
    if "pid" in place.kinds:  # the next child is process 1, so no command may be it
        _unshare(libc, ["pid"])
    init = os.fork()
    if init == 0:
        _init(place, libc, message, replies)
    for reply in replies:
        reply.close()
    with suppress(EOFError, OSError):
        while os.waitpid(init, os.WNOHANG) == (0, 0) and not control.poll(0.05):
            pass
    with suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)
    os._exit(0)


def _unshare(libc: ctypes.CDLL, kinds: Sequence[str]) -> None:
    if libc.unshare(sum(_FLAGS[kind] for kind in kinds)):
        raise OSError(ctypes.get_errno(), f"unshare of {', '.join(kinds)}")


def _switch(pids: Sequence[int], control: Connection) -> None:
    """Join the networks of the processes `pids` until the other end of `control` closes."""
    prepare_process()
    _unshare(ctypes.CDLL(None, use_errno=True), ["net"])
    commands = [f"ip link add {_BRIDGE} type bridge", f"ip link set {_BRIDGE} up"]
    for index, pid in enumerate(pids):
        commands.append(f"ip link add to{index} type veth peer name {_LINK} netns {pid}")
        commands.append(f"ip link set to{index} master {_BRIDGE} up")
    if _obey(control, commands):
        with suppress(EOFError, OSError):
            control.recv()


def _obey(control: Connection, commands: Sequence[str]) -> bool:
    """Run `commands` on request, report how that went, and wait for the start; False where one failed."""
    control.recv()
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        control.send(f"{error}: {error.stderr}")
        return False
    control.send("")
    control.recv()
    return True


def _init(place: _Place, libc: ctypes.CDLL, message: bytes, replies: list[Connection]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if {"mnt", "pid"} <= set(place.kinds):
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
    if place.own_tmp:
        hidden = ROOT.is_relative_to("/tmp")
        if hidden:
            libc.mount(str(ROOT).encode(), b"/mnt", None, _MS_BIND, None)
        libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)
        if hidden:
            ROOT.mkdir(parents=True)
            libc.mount(b"/mnt", str(ROOT).encode(), None, _MS_BIND, None)
    for local, reply in enumerate(replies):
        if os.fork() == 0:
            for other in replies:
                if other is not reply:
                    other.close()
            _rank(place, local, message, reply)
        reply.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _rank(place: _Place, local: int, message: bytes, reply: Connection) -> None:
    prepare_process()
    rank = place.first + local
    os.environ.update(place.variables, RANK=str(rank), LOCAL_RANK=str(local))
    body, args = pickle.loads(message)
    outcome = attempt(body, rank, int(place.variables["WORLD_SIZE"]), *args)
    with suppress(BrokenPipeError):
        reply.send_bytes(dumps(outcome))
    os._exit(0)


def kill_own_host() -> None:
    """End every rank of this host at once, this one too, as a host that loses power."""
    os.kill(-1, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
