"""Policies of widening, run instruction by instruction: each code becomes its number, where packing puts it."""

from __future__ import annotations

import inspect
import re

from iris_ops.planning.weights import BY_NAME
from iris_ops.quantised import widening
from iris_ops.quantised.packing import LINE, PACKINGS
from iris_ops.quantised.widening import Widening
import numpy as np
import pytest
import torch

FORMATS = [name for name in BY_NAME if name != "fp8"]


def bf16(words: np.ndarray) -> torch.Tensor:
    """The two numbers of each word, the low half first, in float64."""
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16).double().view(-1, 2)


def prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    result = np.zeros_like(a)
    for i in range(4):
        byte = selector >> (4 * i) & 7
        result |= ((both >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return result


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    assert table == 0xEA  # (a & b) | c
    return (a & b) | c


OPERATIONS = {
    "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b, "and": lambda a, b: a & b, "lop3": lop3, "prmt": prmt,
    "mov": lambda a: a,
}  # fmt: skip


def run(policy: Widening, first: np.ndarray, second: np.ndarray) -> list[torch.Tensor]:
    """Decode pairs of words by the assembly of `policy`: each product's two numbers, [pairs, 2]."""
    source = inspect.getsource(policy.words.fn)
    constraints = re.search(r'"(=&?r[^"]*)"', source)[1].split(",")
    outputs = sum(each.startswith("=") for each in constraints)
    held: dict[str, np.ndarray] = {f"${outputs}": first, f"${outputs + 1}": second}

    def value(operand: str) -> object:
        return held[operand] if operand in held else np.full_like(first, int(operand, 0))

    for line in re.search(r'"""(\{.*?\})"""', source, re.S)[1].split(";"):
        words = line.strip(" {}\n").replace(",", "").split()
        if words and not words[0].startswith("."):
            name, target, *operands = words
            constants = operands[-1:] if name.split(".")[0] in ("lop3", "prmt") else []
            read = [value(each) for each in operands[: len(operands) - len(constants)]]
            held[target] = OPERATIONS[name.split(".")[0]](*read, *(int(each, 0) for each in constants))
    return [bf16(held[f"${i}"].astype(np.uint32)) for i in range(outputs)]


@pytest.mark.parametrize("name", FORMATS)
def test_each_code_in_each_place(name: str) -> None:
    """Rows shift all codes through a line; words j and j + 1 are one thread's, as dot operands have them."""
    form = BY_NAME[name]
    policy: Widening = getattr(widening, form.widening.split(":")[1])
    packing, group = PACKINGS[form.packing], form.group or None
    fp8 = form.packing == "fp8_block"
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127] if fp8 else every[: 256 if form.packing.startswith("int8") else 16]
    codes = every[(torch.arange(len(every))[:, None] + torch.arange(LINE)[None, :] * (3 if fp8 else 5)) % len(every)]
    codes = codes.view(torch.float8_e4m3fn) if fp8 else codes
    scales = torch.ones(len(codes), *(() if group is None else (LINE // group,)))
    scales = torch.stack((scales, 0 * scales), 2) if form.zeros else scales
    weight, scale = packing.pack(codes, scales, group)
    exact = packing.unpack(weight, scale, LINE, torch.float64)
    words = weight.contiguous().view(torch.int32).numpy().astype(np.int64).astype(np.uint32)
    assert words.shape == (len(codes), policy.WORDS)
    products = run(policy, words[:, ::2].reshape(-1), words[:, 1::2].reshape(-1))
    assert len(products) == policy.PRODUCTS
    for i, product in enumerate(products):
        each = product.view(len(codes), -1) * policy.off + policy.ADDED
        entries = slice(i * LINE // policy.PRODUCTS, (i + 1) * LINE // policy.PRODUCTS)
        expected = exact[:, entries] if policy.RUNS else exact[:, i :: policy.PRODUCTS]
        assert torch.equal(each, expected), i


def test_a_kernel_is_compiled_anew_for_another_policy() -> None:
    policies = [widening.E4M3, widening.E4M3_RUNS, widening.INT4, widening.E2M1, widening.INT8]
    assert len({each.cache_key for each in policies}) == len(policies)
