"""Collectives of whole tensors over the symmetric heap: `ctx.ccl.all_reduce(out, inp)` and its kin.

A collective is what three questions answer: are parts *scattered* (each rank gets its own), is there a sum (*reduce*),
does everyone get every result (*gather*)?

    collective           scatter  reduce  gather
    all_to_all           yes      no      no
    all_gather           no       no      (yes)
    reduce_scatter       yes      yes     no
    all_reduce two_shot  yes      yes     yes
    all_reduce one_shot  no       yes     no

Two kernels serve all of them: `lamport.py`, for small tensors, sends words that say themselves that they have arrived;
`flags.py`, for large ones, stores straight into place and signals. `accumulate.py` and `ring.py` are further
variants of all_reduce. `plan.py` chooses.
"""

from .config import Config, ReduceOp

__all__ = ["Config", "ReduceOp"]
