"""`iris-tp verify` as a user runs it: its output and its exit status."""

from __future__ import annotations

from pathlib import Path
import subprocess

from iris_tp import cli
import pytest

from tests.coverage_of_models import tiny
from tests.harness import UNDER_TORCHRUN
from tests.processes import forkserver
from tests.test_cli import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")


def requested(folder: Path, model_type: str, level: str, *options: str) -> tuple[str, ...]:
    tiny.build(model_type).save_pretrained(folder)
    return "verify", level, "--model", str(folder), "--batches", "3", "--steps", "1", *options


def verified(folder: Path, model_type: str, level: str, *options: str) -> subprocess.CompletedProcess:
    return run(*requested(folder, model_type, level, *options))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [((), 0, "6 batches on 2 ranks, 0 differ: yes, the same bits"), (("--nothing",), 1, "3 differ: no")],
)
@pytest.mark.some(1)
def test_it_exits_with_whether_bits_differ(
    options: tuple[str, ...], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Called here: its ranks are forked from the server of all tests' ranks, and only they compute."""
    forkserver()
    status = cli.main([*requested(tmp_path, "llama", "batch", "--ranks", "2", *options)])
    printed = capsys.readouterr()
    assert status == code, printed.err
    assert message in printed.out


def test_load_compares_weights_with_the_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    forkserver()
    tiny.build("llama").save_pretrained(tmp_path)
    assert cli.main(["verify", "load", "--model", str(tmp_path), "--ranks", "2", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.down_proj.weight (float32 to bfloat16)" in printed
    assert "2 ranks loaded what the files hold" in printed
    arguments = ["verify", "load", "--model", str(tmp_path), "--ranks", "2", "--dtype", "bfloat16", "--weights", "int4"]
    assert cli.main(arguments) == 0
    assert "model.layers.0.mlp.down_proj.weight (float32 to int4 by 128)" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["verify", "load", "--model", str(tmp_path), "--ranks", "2"]) == 2
    assert "iris-tp verify: CheckpointError: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_one_length_is_compared_without_padding(tmp_path: Path) -> None:
    result = verified(tmp_path, "bart", "batch", "--ranks", "2")
    assert result.returncode == 0, result.stderr
    assert "3 batches on 2 ranks, 0 differ" in result.stdout and "without padding: an engine" in result.stdout


def test_what_is_refused_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    forkserver()
    arguments = requested(tmp_path, "mixtral", "ranks", "--ranks", "2,1")
    capsys.readouterr()  # what transformers says of the folder
    assert cli.main([*arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "iris-tp verify: StyleError: model.layers.0.mlp.experts: " in printed.err


@pytest.mark.slow
def test_ranks_say_nothing_beside_that_line(tmp_path: Path) -> None:
    result = verified(tmp_path, "mixtral", "ranks", "--ranks", "2,1")
    assert result.returncode == 2 and not result.stdout
    assert "iris-tp verify: StyleError: model.layers.0.mlp.experts: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("ranks", "--ranks", "2"), "--ranks is 2: expected several"),
        (("ranks", "--ranks", "1,0"), "0; expected an integer from 1"),
        (("batch", "--ranks", "1,2"), "--ranks is 1,2: expected one number"),
        (("batch", "--batches", "0"), "0; expected an integer from 1"),
        (("batch", "--length", "-1"), "-1; expected an integer from 1"),
    ],
)
def test_a_wrong_question_is_refused(arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["verify", *arguments])
    assert error in capsys.readouterr().err
