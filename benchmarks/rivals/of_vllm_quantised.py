"""vLLM's products by quantized weights (https://github.com/vllm-project/vllm), measured where its extensions lie.

Each rival rounds a weight for itself and packs it as its kernel reads it; it gives the numbers that its codes represent
in float64. Rows are rounded in each call where the kernel takes rounded rows. No Python of vLLM is imported: the
extensions, found beside the package `vllm`, register their operators with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

_EXTENSIONS = "_C_stable_libtorch.abi3.so", "_C.abi3.so"
_UINT4B8 = 1 << 50 | 8 << 17 | 4 << 8  # `scalar_types.uint4b8.id`: four bits, less 8
_LARGEST = 448.0  # in e4m3
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rival:
    """A kernel. `prepared(exact)` returns tensors of a weight [N, K] and their numbers; `multiply` x @ weight.t()."""

    prepared: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    multiply: Callable[[torch.Tensor, Tensors], torch.Tensor]
    rounds_rows: bool = False


def load() -> str:
    """Load the extensions, and return why there are none, or ""."""
    spec = find_spec("vllm")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    paths = [folder / name for folder in folders for name in _EXTENSIONS if (folder / name).is_file()]
    for path in paths:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"{path.name} cannot be loaded: {str(error)[:200]}"
    return "" if len(paths) == len(_EXTENSIONS) else "vLLM's extensions are not installed"


def _int4(exact: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes as GPTQ packs them, int32 [K / 8, N], scales bf16 [K / group, N], and the numbers [N, K]."""
    N, K = exact.shape
    groups = exact.float().view(N, K // group, group)
    scale = (groups.abs().amax(2) / 7.5).clamp(min=1e-10).to(torch.bfloat16)
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7)
    numbers = (codes.double() * scale.double()[:, :, None]).view(N, K)
    nibbles = (codes + 8).to(torch.int64).view(N, K // 8, 8)
    words = sum(nibbles[..., i] << (4 * i) for i in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words.t().contiguous(), scale.t().contiguous(), numbers


def _marlin(group: int) -> Rival:
    order = [i + 8 * j for i in range(8) for j in range(8)]  # of the scales of 64 columns

    def prepared(exact: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (N, K), device = exact.shape, exact.device
        words, scale, numbers = _int4(exact, group)
        none = torch.empty(0, dtype=torch.int32, device=device)
        codes = torch.ops._C.gptq_marlin_repack(words, none, K, N, 4, False)
        locks = torch.zeros(torch.cuda.get_device_properties(device).multi_processor_count, device=device).int()
        return (codes, scale.view(-1, 64)[:, order].reshape(-1, N).contiguous(), locks), numbers

    def multiply(x: torch.Tensor, weight: Tensors) -> torch.Tensor:
        codes, scale, locks = weight
        return torch.ops._C.marlin_gemm(
            x, None, codes, None, scale, None, None, None, None, None, locks, _UINT4B8, x.shape[0], scale.shape[1],
            x.shape[1], True, False, True, False,
        )  # fmt: skip

    return Rival(prepared, multiply)


def _machete() -> Rival:
    group = 128

    def prepared(exact: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        words, scale, numbers = _int4(exact, group)
        by_columns = words.t().contiguous().t()
        return (torch.ops._C.machete_prepack_B(by_columns, torch.bfloat16, _UINT4B8, torch.bfloat16), scale), numbers

    def multiply(x: torch.Tensor, weight: Tensors) -> torch.Tensor:
        codes, scale = weight
        return torch.ops._C.machete_mm(x, codes, _UINT4B8, None, scale, None, group, None, None, None)

    return Rival(prepared, multiply)


def _blocks() -> Rival:
    side = 128

    def prepared(exact: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        N, K = exact.shape
        blocks = exact.float().view(N // side, side, K // side, side)
        scale = (blocks.abs().amax((1, 3)) / _LARGEST).clamp(min=1e-10)
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        numbers = codes.double() * scale.double()[:, None, :, None]
        return (codes.view(N, K), scale), numbers.view(N, K)

    def multiply(x: torch.Tensor, weight: Tensors) -> torch.Tensor:
        codes, scale = weight
        M, K = x.shape
        high = -(-M // 4) * 4  # as the kernel takes scales
        rows = x.new_empty(high, K, dtype=torch.float8_e4m3fn)
        of_rows = torch.empty(K // side, high, dtype=torch.float32, device=x.device).t()
        given = x if high == M else torch.nn.functional.pad(x, (0, 0, 0, high - M))
        torch.ops._C.per_token_group_fp8_quant(
            given, rows, of_rows, side, 1e-10, -_LARGEST, _LARGEST, False, True, False
        )  # fmt: skip
        out = x.new_empty(high, codes.shape[0])
        torch.ops._C.cutlass_scaled_mm(out, rows, codes.t(), of_rows, scale.t(), None)
        return out[:M]

    return Rival(prepared, multiply, rounds_rows=True)


RIVALS = {
    "marlin/32": _marlin(32),
    "marlin/128": _marlin(128),
    "machete/128": _machete(),
    "cutlass/128x128": _blocks(),
}
