"""The algorithms whose product is torch's, each a module: `objection`, `predict`, `staged_elements`, `prepare`.

Copy engines also carry rows to a product of ours (`gather_matmul.py`).

What `prepare` returns launches the call, now and whenever it is repeated, and says True as `repeat.Launch.again` does.
It keeps the tensors that it is given.
"""

from .with_torch import copy_gather, copy_reduce, sequential

UNFUSED = {"sequential": sequential, "copy_engines": copy_gather, "shard_sums": copy_reduce}
