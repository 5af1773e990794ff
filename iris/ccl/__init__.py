"""Collectives of whole tensors over the symmetric heap: `ctx.ccl.all_reduce(out, inp)` and the others below.

Three questions tell one collective from another. Does each rank get a separate part (*scatter*)? Is there a sum
(*reduce*)? Does every rank get every result (*gather*)?

    collective           scatter  reduce  gather
    all_to_all           yes      no      no
    all_gather           no       no      (yes)
    reduce_scatter       yes      yes     no
    all_reduce two_shot  yes      yes     yes
    all_reduce one_shot  no       yes     no

Two kernels answer all of them. `lamport.py` sends small tensors as Lamport values, which need no signal. `flags.py`
stores large tensors straight into place and signals. `accumulate.py` and `ring.py` are further variants of all_reduce.
`plan.py` chooses.
"""

from . import p2p
from .config import Config, ReduceOp
from .messages import P2POp

__all__ = ["Config", "P2POp", "ReduceOp", "p2p"]
