"""Files that are not what they should be: headers, indexes, configurations, names, and what is no file at all."""

from __future__ import annotations

from collections.abc import Callable
import json
import os
from pathlib import Path
import time
from typing import Any

from iris.errors import CheckpointError
import layers
from layers.checkpoint.buffers import Staging
from layers.checkpoint.files import Checkpoint
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models
from tests.processes import patient

pytestmark = both
no_ranks = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


# --- one file --------------------------------------------------------------------------------------------------------

PLAIN = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def stored(header: Any, data: int = 24, length: int | None = None) -> bytes:
    """Write a safetensors file with `header`, which may be text, followed by `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


HEADERS = {
    "empty file": (b"", "has 0 bytes"),
    "no header": (b"\0" * 8, "says that its header has 0"),
    "header of all memory": (stored({"a": PLAIN}, length=(1 << 64) - 1), "its header has 18446744073709551615"),
    "header behind the end": (stored({"a": PLAIN}, length=1000), "says that its header has 1000"),
    "no JSON": (stored(b"{nonsense"), "the header Expecting property name"),
    "no UTF-8": (stored(b'{"\xff": 1}'), "the header is not text"),
    "a list": (stored([]), "is a JSON list: expected an object"),
    "deep": (stored(b"[" * 100_000), "the header is JSON with too many levels"),
    "NaN": (stored(b'{"a": NaN}'), "holds NaN, which is not a number"),
    "a number of many digits": (stored(b'{"a": ' + b"9" * 5000 + b"}"), "the header Exceeds the limit"),
    "a key twice": (stored(b'{"a": {}, "a": {}}'), "has a twice"),
    "metadata": (stored({"__metadata__": {"a": 1}}, 0), "__metadata__ is {'a': 1}: expected texts by name"),
    "an entry that is none": (stored({"a": 3}), "a is 3: expected dtype, shape and data_offsets"),
    "dtype": (stored({"a": PLAIN | {"dtype": "F33"}}), "a is stored as F33: expected one of"),
    "dtype of another kind": (stored({"a": PLAIN | {"dtype": ["F32"]}}), r"a is stored as \['F32'\]: expected one of"),
    "no dtype": (stored({"a": {"shape": [6], "data_offsets": [0, 24]}}), "a is stored as None"),
    "negative": (stored({"a": PLAIN | {"shape": [-2, -3]}}), r"a has shape \[-2, -3\]: expected sizes"),
    "a fraction": (stored({"a": PLAIN | {"shape": [2.0, 3]}}), r"a has shape \[2.0, 3\]: expected sizes"),
    "a bool": (stored({"a": PLAIN | {"shape": [True, 6]}}), "a has shape .*: expected sizes"),
    "infinite": (stored(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 24]}}'), "a has shape .inf.:"),
    "dimensions": (stored({"a": PLAIN | {"shape": [1 << 62] * 100_000}}), "a has shape .*: expected sizes"),
    "overflow": (stored({"a": PLAIN | {"shape": [1 << 62, 4]}}), "a lies at .*: expected 73786976294838206464 bytes"),
    "three offsets": (stored({"a": PLAIN | {"data_offsets": [0, 12, 24]}}), "expected where it starts and ends"),
    "backwards": (stored({"a": PLAIN | {"data_offsets": [24, 0]}}), "a lies at .*: expected 24 bytes"),
    "too short": (stored({"a": PLAIN | {"data_offsets": [0, 20]}}), "a lies at .*: expected 24 bytes"),
    "a gap": (stored({"a": PLAIN | {"data_offsets": [4, 28]}}, 28), "a starts at byte 4 of the data: expected 0"),
    "overlap": (stored({"a": PLAIN, "b": PLAIN | {"data_offsets": [12, 36]}}, 36), "b starts at byte 12 .*"),
    "the same bytes": (stored({"a": PLAIN, "b": PLAIN}), "b starts at byte 0 of the data: expected 24"),
    "truncated": (stored({"a": PLAIN}, 23), "expected [0-9]+, as its header says"),
    "something behind": (stored({"a": PLAIN}, 25), "expected [0-9]+, as its header says"),
    "a name that moves the cursor": (stored({"a\x1b[2J\n\u202e": 3}), r"a\\x1b\[2J\\n\\u202e is 3: expected dtype"),
    "a long name": (stored({"a" * 100_000: 3}), "a{200}[.]{3} is 3: expected dtype"),
}  # fmt: skip


@no_ranks
@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path: Path, case: str) -> None:
    content, words = HEADERS[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(tmp_path, Staging("cpu"))
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


@no_ranks
def test_a_file_without_tensors_and_one_of_a_scalar(tmp_path: Path) -> None:
    tensors = {"one": torch.tensor(2.5), "none": torch.empty(0, 3), "half": torch.ones(3, dtype=torch.float16)}
    for each in ({}, tensors):
        save_file(each, tmp_path / "model.safetensors")
        with Checkpoint(tmp_path, Staging("cpu")) as checkpoint:
            assert checkpoint.keys() == each.keys()
            assert all(torch.equal(checkpoint[name][:], each[name]) for name in each)


# --- several files, and the index ------------------------------------------------------------------------------------


def in_two(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """Write `a` and `both` to x.safetensors, `b` and another `both` to y; the index names y, except for `changes`."""
    save_file({"a": torch.zeros(2), "both": torch.zeros(2)}, folder / "x.safetensors")
    save_file({"b": torch.ones(2), "both": torch.ones(2)}, folder / "y.safetensors")
    places = {"a": "x.safetensors", "b": "y.safetensors", "both": "y.safetensors"} | (changes or {})
    places = {name: place for name, place in places.items() if place is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@no_ranks
@pytest.mark.parametrize("listed", ["x.safetensors", "y.safetensors"])
def test_of_a_tensor_that_is_stored_twice_the_index_decides(tmp_path: Path, listed: str) -> None:
    in_two(tmp_path, {"both": listed})
    with Checkpoint(tmp_path, Staging("cpu")) as checkpoint:
        assert torch.equal(checkpoint["both"][:], torch.full((2,), float(listed == "y.safetensors")))
        assert checkpoint.keys() == {"a", "b", "both"}


INDEXES = {
    "stored elsewhere": (
        {"a": "y.safetensors", "both": "x.safetensors"},
        "a is stored in x.safetensors, and the index says in y.safetensors",
    ),
    "stored nowhere": ({"c": "y.safetensors"}, "c is stored nowhere, and the index says in y.safetensors"),
    "listed nowhere": ({"b": None}, "b is stored in y.safetensors, and the index does not list it"),
    "no file": ({"c": "z.safetensors"}, "z.safetensors: .*No such file"),
    "out of the folder": ({"a": "../x.safetensors"}, "weight_map names '../x.safetensors', expected names of files"),
    "absolute": ({"a": "/etc/passwd"}, "weight_map names '/etc/passwd', expected names of files in the folder"),
    "in a folder": ({"a": "sub/x.safetensors"}, "weight_map names 'sub/x.safetensors'"),
    "by backslashes": ({"a": "..\\x.safetensors"}, "weight_map names .*, expected names of files"),
    "the folder": ({"a": "."}, "weight_map names '.', expected names of files"),
    "nothing": ({"a": ""}, "weight_map names '', expected names of files"),
    "NUL": ({"a": "x\0.safetensors"}, r"weight_map names .*expected names of files"),
    "a number": ({"a": 3}, "weight_map names 3, expected names of files"),
    "a list": ({"a": ["x.safetensors"]}, "weight_map names .*, expected names of files"),
    "a name that moves the cursor": ({"a": "\x1b[2J"}, r"\\x1b\[2J: .*No such file"),
    "many": ({f"c{i}": "y.safetensors" for i in range(1000)}, "; and 980 more$"),
}


@no_ranks
@pytest.mark.parametrize("case", INDEXES)
def test_indexes(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    changes, words = INDEXES[case]
    in_two(folder, changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(folder, Staging("cpu"))
    assert len(str(caught.value)) < 3000 and str(caught.value).isprintable()


@no_ranks
@pytest.mark.parametrize(
    "text", ["[]", "{}", "nonsense", '{"weight_map": {}}', '{"weight_map": 3}', '{"a": 1, "a": 1}']
)
def test_what_is_no_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        Checkpoint(tmp_path, Staging("cpu"))


@no_ranks
def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    in_two(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    with Checkpoint(tmp_path / "snapshot", Staging("cpu")) as checkpoint:
        assert checkpoint.keys() == {"a", "b", "both"}


# --- whole folders ---------------------------------------------------------------------------------------------------


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def fifo(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace


def link(name: str, to: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return replace


def directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def index_fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fifo("model.safetensors.index.json")(folder)


def shard_fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    in_two(folder)
    fifo("x.safetensors")(folder)


def many_strangers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.\x1b[3{i}m\n{i}": torch.zeros(1) for i in range(500)}
    save_file(tensors | more, folder / "model.safetensors")


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights in a FIFO": (fifo("model.safetensors"), "model.safetensors is not a regular file"),
    "weights in a device": (link("model.safetensors", "/dev/zero"), "model.safetensors is not a regular file"),
    "weights in a folder": (directory, "model.safetensors is not a regular file"),
    "weights in themselves": (
        link("model.safetensors", "model.safetensors"),
        "model.safetensors: .*levels of symbolic",
    ),
    "weights in a broken link": (link("model.safetensors", "nowhere"), "model.safetensors: .*No such file"),
    "the index is a FIFO": (index_fifo, "model.safetensors.index.json is not a regular file"),
    "a shard is a FIFO": (shard_fifo, "x.safetensors is not a regular file"),
    "the configuration is a FIFO": (fifo("config.json"), "config.json is not a regular file"),
    "the configuration is a device": (link("config.json", "/dev/zero"), "config.json is not a regular file"),
    "the generation configuration is a FIFO": (
        fifo("generation_config.json"),
        "generation_config.json is not a regular",
    ),
    "many layers": (
        lambda folder: configure(folder, num_hidden_layers=20_000),
        "num_hidden_layers is 20000, and the files hold 21 tensors",
    ),
    "all the layers": (lambda folder: configure(folder, num_hidden_layers=10**18), "num_hidden_layers is 10{18}, and"),
    "many layers within the limit": (
        lambda folder: configure(folder, num_hidden_layers=999),
        "the configuration's model has far more parameters than the files have tensors",
    ),
    "labels": (lambda folder: configure(folder, num_labels=10**10), "num_labels is 10{10}: expected at most 100000"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]") and None, "is a JSON list: expected an object"),
    "no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff") and None, "config.json: is not text"),
    "many strangers": (many_strangers, r"500 problem\(s\):\n  model.\\x1b\[30m\\n0 has no place .*\n  and 460 more$"),
}


def folders_body(ctx, root: str) -> None:
    for case, (_, words) in FOLDERS.items():
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
            layers.from_pretrained(f"{root}/{case}", ctx)
        assert time.monotonic() - began < patient(5) and len(str(caught.value)) < 6000, case
        assert "\x1b" not in str(caught.value)
    layers.from_pretrained(f"{root}/sound", ctx)


@two_ranks
def test_folders(world_size: int, tmp_path: Path) -> None:
    root = agreed(tmp_path)
    if root == tmp_path:
        for case, (spoil, _) in [*FOLDERS.items(), ("sound", (lambda folder: None, ""))]:
            models.build("plain").save_pretrained(root / case)
            spoil(root / case)
    agreed(None)
    run_ranks(world_size, folders_body, str(root))
