"""The adapter to tritonBLAS's selector, with a fake that has its names and with the package itself."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
import sys

from iris.machines import machine_named
from iris_ops.planning import tritonblas
from iris_ops.planning.plan import choose, plan
from iris_ops.problem import ALL_REDUCE, REDUCE_SCATTER, Problem
import pytest
import torch

# The constructor and the properties as in include/tritonblas/origami.py of ROCm/tritonBLAS at 95e2c47; nothing else.
SELECTOR = """
class OrigamiMatmulSelector:
    def __init__(self, m, n, k, a_dtype, b_dtype, out_dtype, device, mx_block_size=0, streamk=False, total_cus=None,
                 active_cus=None, num_stages=2):
        assert device.type == "cuda" and device.index == 1
        if a_dtype.itemsize == 4:
            raise ValueError("No Valid Matrix Instruction")
        self._asked, self._num_stages = (m, n, k, a_dtype, b_dtype, out_dtype), num_stages
        type(self).last = self

    @property
    def block_m(self):
        return 256 if self._asked[0] > 100 else 16

    @property
    def block_n(self):
        return 128 if self._asked[1] != 72 else 48

    @property
    def block_k(self):
        return 64

    @property
    def num_stages(self):
        return self._num_stages
"""

AMD = "AMD Instinct MI300X"


def problem(m: int = 2048, n: int = 8192, dtype: torch.dtype = torch.bfloat16, op: str = REDUCE_SCATTER) -> Problem:
    return Problem(op, "rows" if op == REDUCE_SCATTER else "", m, n, 7168, 4, dtype)


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As on AMD's second device; `amd(source)` makes that source the package tritonblas."""

    def install(source: str) -> None:
        (tmp_path / "tritonblas.py").write_text(source)
        importlib.invalidate_caches()

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: AMD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tritonblas", raising=False)
    forget()
    yield install
    sys.modules.pop("tritonblas", None)
    forget()


def forget() -> None:
    """Choices are remembered; here the machine changes."""
    tritonblas._selected.cache_clear()
    choose.cache_clear()


def test_a_plan_takes_the_tile_and_says_so(amd) -> None:
    amd(SELECTOR)
    here, case = machine_named(AMD, 304), problem()
    chosen = plan(case, here)
    tile = (chosen.block_m, chosen.block_n, chosen.block_k, chosen.num_warps, chosen.num_stages)
    assert tile == (256, 128, 64, 8, 2) and chosen.algorithm == "overlapped"
    assert "tritonblas selects blocks 256x128x64, 2 stages" in chosen.explain()
    assert plan(problem(m=4, op=ALL_REDUCE), here).algorithm != "overlapped"  # few rows: our own kernels and tiles
    elsewhere = plan(case, machine_named("NVIDIA H200", 132))
    assert "tritonblas" not in elsewhere.explain() and elsewhere.num_stages != 2
    fp32 = plan(problem(dtype=torch.float32), here)
    assert "No Valid Matrix Instruction" in fp32.explain() and (fp32.block_m, fp32.block_n) != (256, 128)


def test_what_the_selector_cannot_serve_is_said(amd) -> None:
    amd(SELECTOR)
    assert not tritonblas.tiles(problem(dtype=torch.float32), AMD) and not tritonblas.tiles(problem(n=72), AMD)
    assert "No Valid Matrix Instruction" in tritonblas.reasons(problem(dtype=torch.float32), AMD)[0]
    assert "expected powers of two" in tritonblas.reasons(problem(n=72), AMD)[0]
    assert not tritonblas.tiles(problem(m=0), AMD) and not tritonblas.reasons(problem(m=0), AMD)


def test_without_the_package_or_without_amd_our_model_decides(amd, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tritonblas") is None:
        assert not tritonblas.tiles(problem(), AMD) and not tritonblas.reasons(problem(), AMD)
    amd(SELECTOR)
    monkeypatch.setattr(torch.version, "hip", None)
    forget()
    assert not tritonblas.tiles(problem(), AMD) and not tritonblas.reasons(problem(), AMD)


@pytest.mark.skipif(torch.version.hip is None, reason="tritonblas is for AMD")
def test_the_installed_selector_has_the_names_that_are_used() -> None:
    selector = pytest.importorskip("tritonblas").OrigamiMatmulSelector
    named = list(inspect.signature(selector).parameters)
    assert named[:7] == ["m", "n", "k", "a_dtype", "b_dtype", "out_dtype", "device"]
    assert all(
        isinstance(getattr(selector, name), property) for name in ("block_m", "block_n", "block_k", "num_stages")
    )
    assert tritonblas.tiles(problem(op=ALL_REDUCE), torch.cuda.get_device_name())
