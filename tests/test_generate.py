"""`iris-tp generate` gives the unsplit model's text, and refuses in one line what cannot work, before ranks start."""

import contextlib
import io
import os
from pathlib import Path
import subprocess
import sys

from iris_tp import arguments as parsers
from iris_tp import cli, generate, launch
import pytest

from tests import tiny_chat
from tests.processes import ROOT, forkserver, patient, python_path, run_fresh

pytest.importorskip("transformers")
PROMPT = "Was man nicht weiß, das eben brauchte man."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", "iris_tp", "generate", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(240), input=stdin or "",
    )  # fmt: skip


def on_a_rank(rank: int, world: int, folder: str, *arguments: str) -> tuple[str, str]:
    """What a rank prints to stdout and stderr."""
    args = parsers.generate().parse_args([folder, PROMPT, *arguments])
    printed, progress = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(progress):
        generate.rank_main(Path(folder), generate._task(args, folder, on_gpu=False))
    return printed.getvalue(), progress.getvalue()


def ranks(world: int, folder: Path, *arguments: str) -> list[tuple[str, str]]:
    ends = run_fresh(world, on_a_rank, str(folder), *arguments)
    assert all(end.exitcode == 0 for end in ends), [end.traceback for end in ends]
    return [end.result for end in ends]


@pytest.mark.parametrize("chat", [True, False])
def test_text_is_the_unsplit_model_s_and_rank_0_prints_it(chat: bool, checkpoint: Path) -> None:
    expected = tiny_chat.answer(checkpoint, PROMPT, 12, chat)
    first, *others = ranks(2, checkpoint, "--tokens", "12", *(["--chat"] if chat else []))
    assert first[0] == f"{expected}\n" and len(expected) > 3
    assert "12 tokens in" in first[1] and "loading" in first[1]
    assert all(out == "" and "tokens in" not in err for out, err in others)


def test_samples_repeat_by_their_seed(checkpoint: Path) -> None:
    options = ("--tokens", "5", "--temperature", "1.5", "--top-p", "0.9", "--seed")
    once, again, other = (ranks(2, checkpoint, *options, seed)[0][0] for seed in ("5", "5", "6"))
    assert once == again != other


def test_weights_in_fp8_are_taken(checkpoint: Path) -> None:
    (out, err), _ = ranks(2, checkpoint, "--weights", "fp8", "--tokens", "2", "--dtype", "bfloat16")
    assert out and "2 tokens in" in err


def _write_to_stdout(results: Path) -> None:
    with launch.reporting(results):
        os.write(1, b"text")


def test_a_reader_that_leaves_ends_the_ranks_quietly(tmp_path: Path) -> None:
    """The pipe of a rank breaks; the command then ends with 141, as `tests/test_cli.py` has it for others."""
    reader, writer = os.pipe()
    os.close(reader)
    body = "launch.run_reporting(test_generate._write_to_stdout, 1, pathlib.Path(sys.argv[1]))"
    code = f"import pathlib, sys; from iris_tp import launch; from tests import test_generate; {body}"
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()},
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=patient(60),
    )  # fmt: skip
    os.close(writer)
    assert ended.stderr.strip().endswith("BrokenPipeError"), ended.stderr


@pytest.mark.slow
def test_the_command_reads_a_prompt_and_starts_its_ranks(checkpoint: Path) -> None:
    result = run(str(checkpoint), "-", "--tokens", "9", "--ranks", "2", stdin=PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tiny_chat.answer(checkpoint, PROMPT, 9, chat=False)}\n"
    assert "2 ranks on CPUs" in result.stderr


def refusal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The one line of a refusal, after which no rank has started."""
    monkeypatch.setattr(launch, "started", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line]
    assert code == 2 and not printed.out and len(lines) == 1, (code, printed)
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such", "hm"), "MODEL is '/no/such'; expected a folder, a name on the Hugging Face hub, or smollm2"),
        (("nobody/nothing", "hm"), "MODEL is 'nobody/nothing', which cannot be loaded: "),
        (("TINY", ""), "PROMPT is empty; expected at least one token"),
        (("TINY", "hm", "--tokens", "255"), "PROMPT has 2 tokens and --tokens is 255; expected at most 256 together"),
        (("TINY", "hm", "--tokens", "0"), "--tokens is 0; expected an integer from 1"),
        (("TINY", "hm", "--ranks", "99"), "--ranks is 99; expected an integer from 1 to 16"),
        (("TINY", "hm", "--temperature", "-1"), "--temperature is -1; expected a number from 0"),
        (("TINY", "hm", "--temperature", "nan"), "--temperature is 'nan'; expected a number from 0"),
        (("TINY", "hm", "--top-p", "1.5"), "--top-p is '1.5'; expected a number above 0, at most 1"),
        (("TINY", "hm", "--weights", "int3"), "--weights: invalid choice: 'int3'"),
        (("TINY",), "the following arguments are required: PROMPT"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(
    arguments: tuple[str, ...], message: str, checkpoint: Path, capsys, monkeypatch
) -> None:
    arguments = tuple(str(checkpoint) if each == "TINY" else each for each in arguments)
    line = refusal(capsys, monkeypatch, *arguments)
    assert line.startswith("iris-tp generate: ") and message in line


def test_a_chat_needs_a_template(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tiny_chat.save(tmp_path, chat=False)
    assert "has no chat template; leave --chat out" in refusal(capsys, monkeypatch, str(folder), "hm", "--chat")


def test_torchrun_is_refused_by_rank_0_alone(capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert "starts its own ranks; run it without torchrun" in refusal(capsys, monkeypatch, "smollm2", "hm")
    assert "starts its own ranks" in file.read_text()
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["generate", "smollm2", "hm"]) == 2
    assert not capsys.readouterr().err


def test_a_broken_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    forkserver()
    folder = tiny_chat.save(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    capsys.readouterr()
    assert cli.main(["generate", str(folder), "hm", "--ranks", "2"]) == 1
    printed = capsys.readouterr()
    assert "iris-tp generate: CheckpointError: " in printed.err and "Traceback" not in printed.err and not printed.out
