"""One colour for each contender, the same in every picture.

A contender is the library that moves the data: `cuBLAS + NCCL`, `torch + NCCL` and `NCCL` are one. A contender without
a colour raises a KeyError when it is drawn, so that none borrows another's.
"""

import re

OWN_COLOUR = "#d62728"
COLOURS = {
    "ours": OWN_COLOUR,
    "ours, sequence parallel": "#7b3294",
    "ours, tokens not shared": "#d6a5c9",
    "ours, fp8": "#ff9e8a",
    "ours, fp8, sequence parallel": "#c2a5cf",
    "ours, fp8_block": "#f4a582",
    "ours, int4": "#b2182b",
    "ours, mxfp4": "#67001f",
    "ours alone": "#8c564b",
    "cuBLAS alone": "#000000",
    "NCCL": "#1f77b4",
    "gloo": "#154360",
    "NCCL, sequence parallel": "#aec7e8",
    "NCCL symmetric": "#17becf",
    "vLLM": "#2ca02c",
    "vLLM, fp8": "#a6d96a",
    "vLLM, int4": "#1a9850",
    "vLLM, mxfp4": "#006837",
    "vLLM custom all-reduce": "#98df8a",
    "torch": "#4d4d4d",
    "torch, filled part": "#a6a6a6",
    "torch one-shot": "#ff7f0e",
    "torch two-shot": "#b8860b",
    "torch reduce-scatter": "#ffbb78",
    "torch async-TP": "#e377c2",
    "copy engines": "#9467bd",
    "FlashInfer one-shot": "#bcbd22",
    "FlashInfer two-shot": "#6b6b00",
    "transformers": "#7f7f7f",
    "Kraken": "#393b79",
    "Kraken fused": "#6b6ecf",
    "Kraken copy engines": "#9c9ede",
    "Kraken one-shot": "#0b3c5d",
    "Kraken two-shot": "#328cc1",
    # of `benchmarks.all_scatter`: ROCm/iris's algorithms on our tiles
    "bulk_synchronous": "#637939",
    "producer_consumer": "#c7e020",
    "fused_sequential": "#00a087",
    "fused_specialized": "#8dd3c7",
    "fused_store_warp": "#01665e",
}
_SAME = {"ctx.ops": "ours", "tiles alone": "ours alone", "torch alone": "cuBLAS alone"}


def contender(name: str) -> str:
    """Return the library that moves the data for a `name` in a result file: "NCCL" of "cuBLAS + NCCL, norm"."""
    name = re.sub(r"^(cuBLAS|torch) \+ ", "", name)
    name = re.sub(r"(,| with) norm$", "", name)
    name = re.sub(r"^vLLM [\d.]+(, \w+$)?.*", r"vLLM\1", name)
    return _SAME.get(name, name)


def colour(name: str) -> str:
    """Return the colour of a contender `name` of a result file. Raises KeyError for a contender that has none."""
    return COLOURS[contender(name)]
