"""Messages and reductions in place, with the states, works and modules of ROCm/iris."""

import iris
from iris.ccl.p2p import P2POp, irecv, isend
import torch

from .device import DEVICE


def messages_with_a_state():
    shmem = iris.iris(1 << 24)
    rank = shmem.get_rank()
    p2p = shmem.ccl.init_p2p(max_numel=4096, dtype=torch.bfloat16)
    shmem.barrier()
    if shmem.get_num_ranks() == 1:
        return
    for i in range(5):
        if rank == 0:
            shmem.ccl.send(torch.full((1024,), float(i), dtype=torch.bfloat16, device=DEVICE), dst=1, p2p_state=p2p)
        elif rank == 1:
            t = torch.zeros(1024, dtype=torch.bfloat16, device=DEVICE)
            shmem.ccl.recv(t, src=0, p2p_state=p2p)
            assert (t == i).all()
    shmem.barrier()


def a_message_and_its_echo():
    shmem = iris.iris(1 << 24)
    rank = shmem.get_rank()
    p2p = shmem.ccl.init_p2p(max_numel=1024, dtype=torch.float32)
    if shmem.get_num_ranks() > 1 and rank < 2:
        data, echo = torch.arange(512.0, device=DEVICE), torch.zeros(512, device=DEVICE)
        if rank == 0:
            work = shmem.ccl.isend(data, dst=1, p2p_state=p2p)
            work.wait()
            shmem.ccl.irecv(echo, src=1, p2p_state=p2p).wait()
            torch.testing.assert_close(echo, data)
        else:
            shmem.ccl.recv(echo, src=0, p2p_state=p2p)
            shmem.ccl.send(echo, dst=0, p2p_state=p2p)
    shmem.barrier()


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
