"""Kernels that inductor launches as dependent wait first, also where its own analysis omits the wait."""

from __future__ import annotations

import json
import re

from iris import platform
from layers.serving import inductor_waits
from layers.serving.compiled import _Backend
import pytest
import torch
import torch._inductor.config as config

from tests import fresh

WAIT = "tl.extra.cuda.gdc_wait()"


@pytest.fixture(scope="module")
def generated() -> dict[str, list[str]]:
    """Of a graph's name, its code as inductor would have it, and as we do."""
    program = "import runpy; runpy.run_module('tests.inductor_code', run_name='__main__')"
    done = fresh.run(program, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def kernels(code: str) -> dict[str, list[str]]:
    """The lines of each kernel's body, by its name."""
    actual = re.findall(r"^def (triton_\w+)\(.*?\):\n(.*?)^'''", code, re.MULTILINE | re.DOTALL)
    assert len(actual) == code.count("= async_compile.triton(") > 0
    return {name: body.splitlines() for name, body in actual}


def hasty(body: list[str]) -> list[str]:
    """Lines that name memory and that a thread may come to before it has waited."""
    actual, waited = [], None
    for line in body:
        depth = len(line) - len(line.lstrip())
        if waited is not None and line.strip() and depth < waited:
            waited = None  # the block in which it has waited is left
        if WAIT in line and waited is None:
            waited = depth
        if waited is None and re.search(r"_ptr\d|\bws_ptr|tl\.(load|store|atomic)", line):
            actual.append(line.strip())
    return actual


@pytest.mark.compile
@pytest.mark.parametrize("graph", ["cache", "filled", "normed", "step"])
def test_every_generated_kernel_waits_before_it_touches_memory(generated, graph: str) -> None:
    plain, waiting = map(kernels, generated[graph])
    assert plain.keys() == waiting.keys()
    for name, body in waiting.items():
        assert not hasty(body), name
    assert all("'launch_pdl': True" in code for code in generated[graph]), "or else waits wait for nothing"


def test_inductor_is_asked_on_such_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert _Backend("inductor", cpu).options == {"config_patches": {"combo_kernels": True}}
    monkeypatch.setattr(platform, "pdl_options", lambda device: {"launch_pdl": True})
    requested = _Backend("inductor", cpu).options["config_patches"]
    assert requested["triton.enable_pdl"] and isinstance(
        requested["_post_fusion_custom_pass"], inductor_waits.WaitFirst
    )
    assert _Backend("aot_eager", cpu).options == {}
    assert _Backend("aot_eager", cpu).__name__ == "aot_eager", "what torch's errors call it"
    for taken in ({"cpp_wrapper": True}, {"_post_fusion_custom_pass": lambda nodes: nodes}):
        with config.patch(taken):
            assert not _Backend("inductor", cpu).options["config_patches"]["triton.enable_pdl"]
