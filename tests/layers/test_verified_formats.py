"""`from_pretrained(..., verify=True)` compares kept codes of each format with the files and notices planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
import layers
from layers.checkpoint.verify import _Allowed, _error
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.layers.test_quantised_models import KEPT, written

pytest.importorskip("transformers")
pytestmark = both
EXPERTS = {"ct_mxfp4": "experts192", "ct_nvfp4": "experts192", "awq": "experts192", "ct_int8": "experts192",
           "fp8_with_fp4_experts": "deepseek", "mxfp4": "gpt_oss", "gptq_v2": "experts384"}  # fmt: skip
CODED = [f"layers.{module}.coded" for module in ("weight_storage", "expert_storage")]
ROWS_OF = "layers.ordered_storage.rows_of"


def shifted_scales(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of the group or, where there is one, of the row before."""
    return codes, scales.roll(1, 1 if scales.shape[1] > 1 and not torch.equal(scales, scales.roll(1, 1)) else 0)


def swapped_nibbles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = codes.view(torch.uint8)[:, : codes.shape[1] // 2 * 2].unflatten(1, (-1, 2)).flip(2).flatten(1)
    return pairs.view(codes.dtype), scales


def inverted_scales(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As of a global scale that divides in place of multiplying; a power of two, which every dtype of scales has."""
    inverse = scales.sign() * torch.exp2(-scales.abs().log2().round())
    return codes, torch.where(scales == 0, scales, inverse)


FAULTS: dict[str, Callable] = {"scales": shifted_scales, "nibbles": swapped_nibbles, "inverse": inverted_scales}


def planted(right: Callable, fault: Callable) -> Callable:
    def wrong(*arguments: Any) -> Iterator[tuple]:
        for *places, codes, scales in right(*arguments):
            yield *places, *fault(codes, scales)

    return wrong


def fault_body(ctx, folder: str, fault: str) -> str:
    """The error of a load in which rank 1 stores a fault."""
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        for place in [*CODED, ROWS_OF] if ctx.cur_rank == 1 else ():
            module, name = place.rsplit(".", 1)
            patch.setattr(place, planted(getattr(importlib.import_module(module), name), FAULTS[fault]))
        with pytest.raises(CheckpointError) as caught:
            layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, verify=True)
    assert layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, verify=True).parallel_report.verified
    return str(caught.value)


def unnoticed(format: str, fault: str) -> bool:
    """Whether a fault changes nothing: all scales of a weight are one."""
    return fault == "scales" and "tensor" in format or fault == "scales" and format in ("modelopt_fp8",)


@pytest.mark.skipif(WORLDS == [1], reason="needs two ranks")
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
@pytest.mark.parametrize("format, fault", [
    (format, fault) for format in KEPT for fault in FAULTS if not unnoticed(format, fault)
])  # fmt: skip
@pytest.mark.some(8, on_gpus=8)
def test_planted_faults_in_kept_weights_are_noticed(tmp_path: Path, world_size: int, format: str, fault: str) -> None:
    folder, _ = written(tmp_path, format, EXPERTS.get(format, "groups128"))
    for text in run_ranks(world_size, fault_body, str(folder), fault):
        named = [line for line in text.split("\n") if "differs from the files by" in line]
        assert named and all("rank 1: model.layers." in line for line in named), text
        assert "_proj" in text
        if format in EXPERTS:
            assert ".experts." in text


def test_a_nan_of_the_files_is_no_difference() -> None:
    exact = torch.tensor([[1.0, torch.nan, torch.inf]])
    allowed = _Allowed.of(torch.float32)
    assert _error(exact.clone(), exact, (), allowed) == 0
    for wrong in ([[torch.nan, torch.nan, torch.inf]], [[1.0, 2.0, torch.inf]], [[1.0, torch.nan, 3.0]]):
        assert _error(torch.tensor(wrong), exact, (), allowed) > 1
