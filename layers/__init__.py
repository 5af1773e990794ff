"""Tensor-parallel layers over fused ops: four split linears, and two calls that split a Hugging Face model.

    ctx = iris.iris()
    model = layers.from_pretrained("path/to/model", ctx)       # each rank reads only its slices
    report = layers.parallelize(model, ctx)                    # or: split a model that is already in memory

Reading order: `shard` computes parts of ranks; `sharded`, `linear` and `merged_linear` are the layers. `hf/` applies a
model's own plan: `styles`, `heads` and `parallelize` split it, and `verify/` runs the split on a copy without weights
and refuses a wrong one. `checkpoint/` loads and saves; `formats/` reads quantised weights, `weight_storage` keeps those
of a layer. `serving/` has the engine, its cache, its prompts and its graphs. `pipeline/` divides a model's layers
between hosts.
"""

from .checkpoint.load import from_pretrained
from .checkpoint.save import save_pretrained
from .hf.generation import share_rng
from .hf.parallelize import parallelize
from .hf.report import Report
from .hf.transformers_adapter import fused_styles
from .linear import ColumnParallelLinear, RowParallelLinear
from .merged_linear import MergedColumnParallelLinear, QKVParallelLinear
from .serving.engine import Engine

__all__ = [
    "ColumnParallelLinear",
    "Engine",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "Report",
    "RowParallelLinear",
    "from_pretrained",
    "fused_styles",
    "parallelize",
    "save_pretrained",
    "share_rng",
]
