"""Messages and reductions in place, with the states, works and modules of ROCm/iris."""

import iris
from iris.ccl.p2p import P2POp, irecv, isend
import torch

from .device import DEVICE


def messages_between_all_pairs():
    shmem = iris.iris(1 << 24)
    rank, n = shmem.get_rank(), shmem.get_num_ranks()
    p2p = shmem.ccl.init_p2p(max_numel=1024, dtype=torch.float32)
    shmem.barrier()
    received, ops = {}, []
    for peer in range(n):
        if peer != rank:
            received[peer] = torch.zeros(1000, device=DEVICE)
            ops.append(P2POp(op=isend, tensor=torch.full((1000,), 100.0 * rank + peer, device=DEVICE), peer=peer))
            ops.append(P2POp(op=irecv, tensor=received[peer], peer=peer))
    works = shmem.ccl.batch_isend_irecv(ops, p2p)
    for work in works:
        work.wait()
    for peer, got in received.items():
        assert (got == 100.0 * peer + rank).all()
    shmem.barrier()


def a_sum_in_place():
    shmem = iris.iris(1 << 22)
    rank, n = shmem.get_rank(), shmem.get_num_ranks()
    for dst in {0, n // 2, n - 1}:
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            tensor = shmem.zeros((16, 8, 4), dtype=dtype)
            tensor.fill_(rank + 1)
            shmem.barrier()
            shmem.ccl.reduce(tensor, dst=dst)
            assert (tensor == (n * (n + 1) / 2 if rank == dst else rank + 1)).all()
    out, inp = shmem.zeros(32, 64), shmem.full((32, 64), 2.0)
    shmem.ccl.reduce(out, inp, root=0)
    assert (out == (2.0 * n if rank == 0 else 0.0)).all()
    shmem.barrier()
