"""Registrations with torch: compiled graphs that torch keeps on disk are of the schemas that are registered."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

from iris_ops.operators import Operators
import pytest
import torch
from torch.compiler import config

COMPILED = """
import sys, torch
from iris_ops.operators import Operators
operators = Operators("iris_cached")
schema = f"double(Tensor x, int[]? {sys.argv[1]}=None) -> Tensor"
double = operators.add(schema, lambda x, _=None: 2 * x, lambda x, _=None: x.new_empty(x.shape))
x = torch.arange(6.0)
assert torch.equal(torch.compile(lambda x: double(x))(x), 2 * x)
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def test_the_key_of_torchs_caches_follows_the_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cache_key_tag", "mine")
    tags = []
    for name in ("first", "second", "first"):
        operators = Operators(f"iris_tagged_{len(tags)}")
        operators.add(f"double(Tensor x, int? {name}=None) -> Tensor", lambda x, _=None: 2 * x, torch.empty_like)
        mine, *_, own = config.cache_key_tag.split(",")
        assert mine == "mine"
        tags.append(own.partition(":")[2])
    assert tags[0] == tags[2] != tags[1]


@pytest.mark.slow
def test_a_cached_graph_of_another_schema_is_not_used(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for name in ("first", "second", "second"):
        command = [sys.executable, "-c", COMPILED, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        hits.append(int(done.stdout.split()[-1]))
    assert hits == [0, 0, 1]
