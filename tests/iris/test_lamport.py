"""A value that a rank sends is never the sentinel, and means what it meant before."""

from __future__ import annotations

from multiprocessing import shared_memory
import time

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris.device.lamport import without_sentinel
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU
from tests.processes import forkserver, patient

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def seal_kernel(x, out, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, without_sentinel(tl.load(x + i).to(tl.float32), DTYPE))


@pytest.mark.skipif(ON_GPU, reason="needs no ranks")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_what_is_sent_is_not_the_sentinel(dtype: torch.dtype) -> None:
    """NaNs stay NaNs, also those with all bits set; all other values, with signs and infinities, keep their bits."""
    empty = torch.full((4,), -1, dtype=INTEGERS[dtype]).view(dtype)
    others = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), float("nan"), 7e4, -1e-3], dtype=dtype)
    x = torch.cat((empty, others, torch.randn(19, dtype=dtype)))
    out = torch.full((32,), -1, dtype=INTEGERS[dtype])
    seal_kernel[(1,)](x, out, 32, TYPES[dtype])
    assert (out != -1).all()
    sent, numbers = out.view(dtype), ~x.isnan()
    assert sent[~numbers].isnan().all() and torch.equal(out[numbers], x.view(INTEGERS[dtype])[numbers])


def store_in_turn(name: str, words: list[int], ready, enough) -> None:
    from triton.runtime import interpreter

    memory = shared_memory.SharedMemory(name)
    pointers = np.full(1 << 14, np.ndarray(1, np.int16, memory.buf).ctypes.data, np.uint64)
    values, mask = np.resize(np.array(words, np.int16), len(pointers)), np.ones(len(pointers), bool)
    ready.set()
    while not enough.is_set():
        interpreter._interpreter.store(pointers, values, mask)


@triton.jit
def look_kernel(word, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(word + i * 0, volatile=True))


@pytest.mark.skipif(ON_GPU, reason="of the interpreter")
def test_words_of_16_bits_are_loaded_whole() -> None:
    """While another process stores them: by memcpy, some hundred of a million loads were half and half."""
    words, seen = [-1, 0x1234], set()
    start = forkserver()
    ready, enough = start.Event(), start.Event()
    memory = shared_memory.SharedMemory(create=True, size=64)
    memory.buf[:2] = b"\xff\xff"
    writer = start.Process(target=store_in_turn, args=(memory.name, words, ready, enough), daemon=True)
    try:
        writer.start()
        assert ready.wait(60)
        word, out = torch.frombuffer(memory.buf, dtype=torch.int16, count=1), torch.empty(1 << 16, dtype=torch.int16)
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < 0.5 or len(seen) < len(words) and elapsed < patient(20):
            look_kernel[(1,)](word, out, len(out))
            seen |= set(out.unique().tolist())
        del word
    finally:
        enough.set()
        writer.join(30)
        memory.close()
        memory.unlink()
    assert seen == set(words), sorted(map(hex, seen))
