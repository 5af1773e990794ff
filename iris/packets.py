"""Send messages, with file descriptors, through a Unix socket that keeps packets apart.

A message may be longer than a packet, so it goes in several. The first gives the message's length and number of
descriptors, and the kernel hands the descriptors over with that packet. Sockets do not block: `send` and `receive` go
as far as they can and remember their progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import errno
import os
import pickle
import socket
import struct

_HEAD = struct.Struct("!QH")  # bytes of the message, descriptors
_MAX_FDS, _MAX_PACKET = 64, 1 << 16
_CHUNK = 48 << 10  # bytes of a message in one packet


def packets_of(data: bytes, num_fds: int) -> Iterator[bytes | memoryview]:
    """Yield the packets of a pickled message with its file descriptors."""
    yield _HEAD.pack(len(data), num_fds) + data[:_CHUNK]
    view = memoryview(data)
    for begin in range(_CHUNK, len(data), _CHUNK):
        yield view[begin : begin + _CHUNK]


def send(peer: socket.socket, sending: dict[int, list], rank: int) -> bool:
    """Send packets until the socket is full; descriptors go with the first. Return False if the peer has closed it."""
    packet, packets, fds = sending[rank]
    try:
        while packet is not None:
            if fds:
                socket.send_fds(peer, [packet], fds)
            else:
                peer.send(packet)
            packet, fds = next(packets, None), []
    except BlockingIOError:
        pass
    except OSError:
        del sending[rank]
        return False
    if packet is None:
        del sending[rank]
    else:
        sending[rank] = [packet, packets, fds]
    return True


def receive(peer: socket.socket, buffers: dict[int, tuple], rank: int) -> tuple | None:
    """Return (the sender's topic, its message, descriptors), once all of its message has come; None before.

    Raises `OSError` for a lost peer; with EMFILE where this process cannot take the descriptors.
    """
    reset = False
    while True:
        try:
            data, fds, flags, _ = socket.recv_fds(peer, _MAX_PACKET, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # reported once, before data that the peer sent until it ended
            if reset:
                raise
            reset = True
            continue
        if not data:
            raise ConnectionResetError
        if rank not in buffers:
            length, descriptors = _HEAD.unpack_from(data)
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) != descriptors:
                close_all(fds)
                raise OSError(errno.EMFILE, f"{descriptors} file descriptors were sent to it and {len(fds)} arrived")
            buffers[rank] = length, bytearray(data[_HEAD.size :]), list(fds)
        else:
            buffers[rank][1].extend(data)
        length, body, received = buffers[rank]
        if len(body) >= length:
            del buffers[rank]
            at, value = pickle.loads(bytes(body))
            return at, value, received


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
