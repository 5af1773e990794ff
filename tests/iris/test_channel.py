"""The channel that passes memory between ranks: who may speak on it."""

import os
import socket
import struct
import time

import iris
from iris import channel, errors, same_host
import pytest
import torch

from tests.iris.heaps import MIB, exchange_through
from tests.processes import patient, run_fresh


def _with_strangers(rank, world_size, folder):
    """Before each rank's call come some that know no nonce, and one that does but is another rank."""
    real, modes, silent = channel.Channel._dial, [], []
    begin = time.monotonic()

    def dial(self, to, reported, deadline):
        path, nonce = reported["path"], reported["nonce"].encode()
        modes.append(os.stat(os.path.dirname(path)).st_mode & 0o777)
        wrong = (b"", b"short", struct.pack("!32sI", b"guessed", rank), struct.pack("!32sI", nonce, to))
        for shown in wrong:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(path)
                if shown:
                    stranger.send(shown)
        for _ in range(20):  # who connect, and say nothing
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent[-1].connect(path)
        return real(self, to, reported, deadline)

    channel.Channel._dial = dial
    with iris.iris(MIB, "vmem") as ctx:
        exchange_through(ctx, ctx.zeros(5000, dtype=torch.int32))
        assert set(modes) <= {0o700} and time.monotonic() - begin < patient(10)
        assert not os.listdir(folder)  # nobody can call any more


def test_strangers_are_turned_away(tmp_path):
    for end in run_fresh(3, _with_strangers, str(tmp_path), env={"TMPDIR": str(tmp_path), "IRIS_TIMEOUT": "20"}):
        assert end.exitcode == 0, end.traceback


def test_another_process_behind_a_socket_is_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        same_host.check_process(ours, 1, os.getpid())
        with pytest.raises(errors.PlatformError, match="expected 1 of user"):
            same_host.check_process(ours, 1, 1)
