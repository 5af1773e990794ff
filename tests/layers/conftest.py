"""What several tests of layers share: models saved as checkpoints, once for all tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import agreed
from tests.layers import models


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """`saved(name)`: the folder of that model, in several files."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = agreed(tmp_path_factory.mktemp(name))
            models.build(name).save_pretrained(folders[name], max_shard_size="20KB")  # of several ranks, rank 0 writes
            agreed(None)
            assert len(list(folders[name].glob("*.safetensors"))) > 1
        return folders[name]

    return save
