"""What ranks are doing when one of them fails: seven states, each a piece of work that a rank repeats until then.

A state is a context manager that gives the work. Inside it stands `with iris.iris(...)`, so an exception leaves a
context the way a user's does. `fail_later` makes this rank the one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
import itertools
import os
from pathlib import Path
import signal
import threading
import time

import iris
import torch

Work = Callable[[], object]
HOWS = ("SIGKILL", "SIGSTOP", "exception")
FAULT, PID = "fault", "pid"  # files of a case's folder: when the victim failed, and which process it is
_AGAIN_S = 3.0  # an exception that came where Python must ignore it is raised again
MODEL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 4}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Fault(Exception):
    """The victim's own exception."""

    text = "the victim's own"


@contextmanager
def op_wait(model: Path, folder: Path) -> Iterator[Work]:
    with iris.iris(1 << 24) as ctx:
        m, n, k = (64, 256, 256) if ctx.device.type == "cuda" else (16, 16, 16)
        A, B = (torch.ones(size, device=ctx.device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        out, whole = ctx.empty(m, n, dtype=A.dtype), ctx.empty(2048)
        given = torch.ones(2048, device=ctx.device)

        def work() -> None:
            ctx.ops.matmul_all_reduce(out, A, B)
            ctx.ccl.all_reduce(whole, given)
            iris.platform.synchronize(ctx.device)
            ctx.check()

        yield work


@contextmanager
def barrier(model: Path, folder: Path) -> Iterator[Work]:
    with iris.iris(1 << 20) as ctx:
        yield ctx.barrier


@contextmanager
def broadcast(model: Path, folder: Path) -> Iterator[Work]:
    with iris.iris(1 << 20) as ctx:
        sources = itertools.cycle(range(ctx.num_ranks))
        yield lambda: ctx.broadcast(torch.ones(1000), src=next(sources))


@contextmanager
def creation(model: Path, folder: Path) -> Iterator[Work]:
    def work() -> None:
        with iris.iris(1 << 20):
            pass

    yield work


@contextmanager
def loading(model: Path, folder: Path) -> Iterator[Work]:
    import layers

    with iris.iris(1 << 24) as ctx:
        yield lambda: layers.from_pretrained(model, ctx)


@contextmanager
def saving(model: Path, folder: Path) -> Iterator[Work]:
    """Save repeatedly, with all weights set to a new number each time, so that a mix of two saves is visible."""
    import layers

    with iris.iris(1 << 24) as ctx:
        split, numbers = layers.from_pretrained(model, ctx), itertools.count(1)

        @torch.no_grad()
        def work() -> None:
            number = next(numbers)
            for parameter in split.parameters():
                parameter.fill_(number % 100)
            split.save_pretrained(folder / "saved")

        yield work


@contextmanager
def generate(model: Path, folder: Path) -> Iterator[Work]:
    import layers

    with iris.iris(1 << 24) as ctx:
        split = layers.from_pretrained(model, ctx)
        prompt = torch.arange(1, 5, device=ctx.device).view(1, 4)
        yield lambda: split.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)


STATES: dict[str, Callable[[Path, Path], AbstractContextManager[Work]]] = {
    "op wait": op_wait,
    "barrier": barrier,
    "broadcast": broadcast,
    "creation": creation,
    "loading": loading,
    "saving": saving,
    "generate": generate,
}


def fail_later(how: str, delay_s: float, folder: Path) -> threading.Event:
    """This process fails after `delay_s`. Set the event once the exception has come, or it is raised again."""
    caught = threading.Event()
    number = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "exception": signal.SIGUSR2}[how]

    def fail() -> None:
        time.sleep(delay_s)
        (folder / PID).write_text(str(os.getpid()))
        again = True
        while again:
            (folder / FAULT).write_text(str(time.monotonic()))  # one clock for all processes
            os.kill(os.getpid(), number)
            again = how == "exception" and not caught.wait(_AGAIN_S)

    def raise_fault(*_: object) -> None:
        raise Fault(Fault.text)

    signal.signal(signal.SIGUSR2, raise_fault)
    threading.Thread(target=fail, daemon=True).start()
    return caught
