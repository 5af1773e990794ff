"""A save that is killed, at each of its steps: the folder loads as the old checkpoint or as the new, never as a mix."""

from __future__ import annotations

from collections.abc import Callable
import json
import os
from pathlib import Path
import shutil
import signal
import sys
from typing import Any

import iris
from iris.errors import CheckpointError
import layers
from layers.checkpoint.folder import INDEX, SINGLE
import pytest
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.processes import run_fresh

transformers = pytest.importorskip("transformers")
pytestmark = both
no_ranks = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 4}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}


def build(value: float, **changes: Any) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model.eval()


# --- a process that dies at its step number n ------------------------------------------------------------------------


class Steps:
    """Counts what this process does to files in `folder`, and kills it before step `fatal`. For good: in a fork."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0
        self.unsynced: set[int] = set()
        self.truncate = os.truncate
        sys.addaudithook(self._heard)
        for name in ("fsync", "write", "pwritev", "truncate"):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of Python: an event, and what it is about. What reads only is no step."""
        if event not in ("open", "os.remove", "os.rename", "os.mkdir") or not str(arguments[0]).startswith(self.folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if event == "os.remove" and not os.path.lexists(arguments[0]):
            return
        self._step()
        if event == "open" and arguments[2] & os.O_TRUNC and os.path.lexists(arguments[0]):
            if self.count == self.fatal:
                self.truncate(arguments[0], 0)  # as it is once it is open
            self._step()
        if event in ("os.remove", "os.rename") and self.unsynced:
            os._exit(3)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, *arguments: Any) -> Any:
            inode = os.fstat(file).st_ino
            if name == "fsync" or inode not in self.unsynced:  # of many writes, one
                self._step()
            (self.unsynced.discard if name == "fsync" else self.unsynced.add)(inode)
            return function(file, *arguments)

        return call

    def _step(self) -> None:
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def in_a_fork(folder: Path, fatal: int | None, body: Callable[[], None]) -> int | None:
    """Runs `body`; the number of its steps, or None if it was killed."""
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            steps = Steps(folder, fatal)
            body()
            os.close(reads)
            os.writev(writes, [str(steps.count).encode()])
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        reported = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), {3: "a file got its name before its bytes were on the disk"}.get(code, code)
    return int(reported) if code == 0 else None


# old to new: the size of a file (None: one file), and how the new configuration differs
SIZES = {"one file": "5GB", "several": 2000}
CASES = {
    "one file to one": ("one file", "one file", {}),
    "one file to several": ("one file", "several", {}),
    "several to one file": ("several", "one file", {}),
    "several to several": ("several", "several", {}),
    "one file to one of another model": ("one file", "one file", {"vocab_size": 20}),
    "several to several of another model": ("several", "several", {"num_hidden_layers": 2}),
}


def killed_body(rank: int, world_size: int, root: str, case: str) -> None:
    ctx = iris.iris(1 << 24)  # of one rank, without a process group, whose threads a fork would lack
    before, after, changes = CASES[case]
    old, new = build(1.0), build(2.0, **changes)
    for model in (old, new):
        layers.parallelize(model, ctx)
    kept, folder = Path(root, "kept"), Path(root, "folder")
    old.save_pretrained(kept, max_shard_size=SIZES[before])
    (kept / "README.md").touch()

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)

    def save() -> None:
        new.save_pretrained(folder, max_shard_size=SIZES[after])

    prepare()
    total, seen, states = in_a_fork(folder, None, save), [], []
    assert total is not None and total > 10 and value_of(folder, ctx) == 2.0 and not unread(folder)
    for step in range(total):
        prepare()
        assert in_a_fork(folder, step, save) is None
        now = what_counts(folder)
        if not states or states[-1] != now:  # else it loads as it did
            seen.append(value_of(folder, ctx))
            states.append(now)
        if step % 9 == 0:  # what was left is no hindrance, and does not stay
            save()
            assert value_of(folder, ctx) == 2.0 and not unread(folder)
    assert seen == sorted(seen) and set(seen) == {1.0, 2.0}, seen


def files(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def unread(folder: Path) -> set[str]:
    """The files in `folder` that nobody reads."""
    index = folder / INDEX
    weights = {SINGLE} if (folder / SINGLE).exists() else {INDEX, *json.loads(index.read_text())["weight_map"].values()}
    return files(folder) - weights - {"config.json", "generation_config.json", "README.md"}


def what_counts(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files that are read, or of all files if the configuration names the weights."""
    named = "transformers_weights" in (folder / "config.json").read_text()
    return {name: (folder / name).read_bytes() for name in files(folder) - (set() if named else unread(folder))}


def value_of(folder: Path, ctx) -> float:
    """That of all parameters, as this loader reads them and as transformers does."""
    values = set()
    for model in (layers.from_pretrained(folder, ctx), transformers.AutoModelForCausalLM.from_pretrained(folder)):
        values |= {float(value) for parameter in model.parameters() for value in parameter.detach().unique()}
    assert len(values) == 1, values
    return values.pop()


@no_ranks
@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new(tmp_path: Path, case: str) -> None:
    alone = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None}
    (ended,) = run_fresh(1, killed_body, str(tmp_path), case, env=alone)
    assert ended.exitcode == 0, ended.traceback


# --- a save that fails -----------------------------------------------------------------------------------------------


def failing_body(ctx, root: str) -> None:
    folder = Path(root, "folder")
    old, new = build(1.0), build(2.0)
    for model in (old, new):
        layers.parallelize(model, ctx)
    old.save_pretrained(folder, max_shard_size=1000)
    usual = files(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    places = ("layers.checkpoint.save.os.fsync", 1), ("layers.checkpoint.buffers.os.pwritev", 1)
    places += ("os.truncate", 0), ("os.replace", 0), ("layers.checkpoint.replacement._sync", 0)
    for place, rank in places:
        ctx.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if ctx.cur_rank == rank:
                patch.setattr(place, fail)
            for size in (1000, "5GB"):
                with pytest.raises(CheckpointError, match=f"rank {rank}: .*No space left on device"):
                    new.save_pretrained(folder, max_shard_size=size)
        ctx.barrier()
        assert files(folder) == usual, place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "truncate", fail)
        with pytest.raises(CheckpointError, match="rank 0: .*No space left on device"):
            new.save_pretrained(f"{root}/other")
    ctx.barrier()
    assert not Path(root, "other").exists()
    left = {float(value) for each in layers.from_pretrained(folder, ctx).parameters() for value in each.unique()}
    assert left - {0.0} == {1.0}, "zeros: of a rank without heads"
    ctx.barrier()
    if ctx.cur_rank == 0:
        (folder / "adapter_config.json").write_text("{}")
    ctx.barrier()
    with pytest.raises(CheckpointError, match="holds adapter_config.json, which transformers would load"):
        new.save_pretrained(folder)
    for path in folder.iterdir() if ctx.cur_rank == 0 else ():
        path.unlink()
    ctx.barrier()
    if ctx.cur_rank == 0:
        (folder / "model.safetensors.partial").symlink_to(f"{root}/elsewhere")
        (folder / "model.safetensors").symlink_to(f"{root}/elsewhere")
        Path(root, "elsewhere").write_text("as it was")
    ctx.barrier()
    new.save_pretrained(folder)
    assert Path(root, "elsewhere").read_text() == "as it was"


@two_ranks
def test_a_save_that_fails_leaves_what_was_there(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, failing_body, str(agreed(tmp_path)))
