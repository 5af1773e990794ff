"""The algorithms whose product is torch's, each a module: `objection`, `predict`, `staged_elements`, `prepare`.

Copy engines also carry rows to a product of ours (`all_gather_matmul_roles.py`).

What `prepare` returns launches the call, now and whenever it is repeated, and says True as `repeat.Launch.again` does.
It keeps the tensors that it is given.
"""

from . import copy_engines, sequential, shard_sums

UNFUSED = {"sequential": sequential, "copy_engines": copy_engines, "shard_sums": shard_sums}
