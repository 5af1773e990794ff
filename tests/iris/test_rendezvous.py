"""A rendezvous in a store into which other processes may write: an entry that no rank wrote is a typed error."""

from __future__ import annotations

import json
import os
import time

from iris import channel, rendezvous
from iris.errors import PlatformError
import pytest
import torch.distributed as dist

from tests.harness import UNDER_TORCHRUN

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")

OWN = {"pid": os.getpid(), "path": "/tmp/a/socket", "nonce": "0" * 32, "failure": "", "versions": "these"}
FORGED = {
    "nothing": b"",
    "no JSON": b"nonsense",
    "no text": b"\xff",
    "a list": b"[]",
    "without a path": json.dumps({**OWN, "path": None}).encode(),
    "a path that is a number": json.dumps({**OWN, "path": 3}).encode(),
    "a failure that is none": json.dumps({**OWN, "failure": 3}).encode(),
    "a process by name": json.dumps({**OWN, "pid": "7"}).encode(),
    "no process": json.dumps({**OWN, "pid": 0}).encode(),
    "an infinite process": b'{"pid": 1e400, "path": "", "nonce": "", "failure": ""}',
}


@pytest.mark.parametrize("what", FORGED)
def test_what_is_none_of_a_ranks_is_refused(what: str) -> None:
    store = dist.HashStore()
    store.set("here/1", FORGED[what])
    with pytest.raises(PlatformError, match="the entry of rank 1 in the store of the process group is invalid: "):
        rendezvous.gather(store, "here", 0, 2, OWN, 5.0)


@pytest.mark.parametrize("text", ["", "-1", "one", "1.5"])
def test_a_loss_of_nobody_is_refused(text: str) -> None:
    store = dist.HashStore()
    store.set("here/lost", text)
    with pytest.raises(PlatformError, match="of a lost rank in the store of the process group is invalid"):
        rendezvous.gather(store, "here", 0, 2, OWN, 5.0)


def test_versions_may_be_missing() -> None:
    """Another version of the library leaves another form: which versions there are is then what is compared."""
    store = dist.HashStore()
    other = {key: value for key, value in OWN.items() if key != "versions"}
    store.set("here/1", json.dumps(other))
    assert rendezvous.gather(store, "here", 0, 2, OWN, 5.0) == [OWN, other]


@pytest.mark.parametrize("reported", [{"path": "/tmp/a\0b/socket"}, {"path": "/tmp/\ud800/socket"}])
def test_a_socket_that_is_none_is_refused(reported: dict) -> None:
    alone = channel.Channel(dist.HashStore(), "here", 0, 1, 5.0, lambda: False)
    with pytest.raises(PlatformError, match="rank 1's entry about its socket is invalid: "):
        alone._dial(1, OWN | reported, time.monotonic() + 1)
