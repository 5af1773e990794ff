"""The assembly that widens experts' codes of four bits, instruction by instruction: each code becomes its number."""

from __future__ import annotations

from pathlib import Path
import re

from iris_ops.moe import coded
from iris_ops.quantised.packing import INT4, LINE, MXFP4, FourBits
import numpy as np
import pytest
import torch

from tests.iris_ops.test_widening import OPERATIONS, bf16


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Two products of bf16 in each word, plus the third operand, rounded once: float64 holds them exactly."""
    total = (bf16(a) * bf16(b) + bf16(c)).to(torch.bfloat16)
    return total.contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint32)


def run(function: str, words: np.ndarray) -> list[torch.Tensor]:
    """Decode words by the assembly of a function: eight numbers each, in float64."""
    source = re.search(rf'def {function}\(.*?"""(\{{.*?\}})"""', Path(coded.__file__).read_text(), re.S)[1]
    held: dict[str, np.ndarray] = {"$8": words}
    numbers: dict[int, torch.Tensor] = {}
    for line in source.split(";"):
        line = line.strip().removeprefix("{").strip()
        if unpacked := re.match(r"mov\.b32 \{\$(\d), \$(\d)\}, (\w)", line):
            both = bf16(held[unpacked[3]])
            numbers |= {int(unpacked[1]): both[:, 0], int(unpacked[2]): both[:, 1]}
            continue
        parts = line.replace(",", "").split()
        if not parts or parts[0].startswith(".") or parts[0] == "}":
            continue
        name, target, *operands = parts
        kind = name.split(".")[0]
        constants = [int(operands.pop(), 0)] if kind == "lop3" else []
        read = [held[each] if each in held else np.full_like(words, int(each, 0)) for each in operands]
        operation = fma if kind == "fma" else OPERATIONS[kind]
        held[target] = operation(*read, *constants).astype(np.uint32)
    assert sorted(numbers) == list(range(8))
    return [numbers[i] for i in range(8)]


@pytest.mark.parametrize("packing, function", [(INT4, "widen_int4"), (MXFP4, "widen_e2m1")])
def test_each_code_in_each_place(packing: FourBits, function: str) -> None:
    """Rows shift all codes through a line. Outputs 2 n and 2 n + 1 are the halves of product n of a word."""
    codes = ((torch.arange(16)[:, None] + torch.arange(LINE)[None, :] * 5) % 16).to(torch.uint8)
    weight, scale = packing.pack(codes, torch.ones(16, LINE // 32), 32)
    exact = packing.unpack(weight, scale, LINE, torch.float64)
    words = weight.contiguous().view(torch.int32).numpy().astype(np.int64).astype(np.uint32).reshape(-1)
    numbers = torch.stack(run(function, words), -1).view(16, 8, 2, 4, 2)  # row, m, h, product, half
    assert torch.equal(numbers.permute(0, 2, 3, 1, 4).reshape(16, LINE), exact)
