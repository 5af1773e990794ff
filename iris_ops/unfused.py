"""The algorithms whose product is torch's, each a module: `objection`, `predict`, `staged_elements`, `prepare`."""

from . import copy_engines, sequential, shard_sums

UNFUSED = {"sequential": sequential, "copy_engines": copy_engines, "shard_sums": shard_sums}
