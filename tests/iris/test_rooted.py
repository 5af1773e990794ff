"""Collectives with a root: any dtype, any place and strides, groups, bad arguments, replay."""

from iris.errors import ArgumentError, DtypeError, ShapeError
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def _values(rank: int, *shape: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1000 * turn + rank))
    return drawn % 2 == 1 if dtype == torch.bool else drawn.to(dtype)


def _rooted(ctx, dtype, group=None, ranks=None):
    """All four, from and to each root, several times: of tensors on the heap, outside, and with strides."""
    ranks = ranks or tuple(range(ctx.num_ranks))
    size, rank = len(ranks), ranks.index(ctx.cur_rank)
    of = [[_values(r, 3, 5, dtype=dtype, turn=turn) for r in range(size)] for turn in range(3)]
    for turn, root in enumerate((0, size - 1, size // 2)):
        mine = of[turn][rank].to(ctx.device)
        tensor = ctx.empty(3, 5, dtype=dtype) if turn else torch.empty(5, 3, dtype=dtype, device=ctx.device).t()
        tensor.copy_(mine)
        ctx.ccl.broadcast(tensor, root, group)
        assert torch.equal(tensor.cpu(), of[turn][root])
        wide = torch.zeros(3 * size, 10, dtype=dtype, device=ctx.device)
        ctx.ccl.gather(wide[:, ::2] if rank == root else None, mine, root, group)
        want = torch.cat(of[turn]) if rank == root else torch.zeros(3 * size, 5, dtype=dtype)
        assert torch.equal(wide[:, ::2].cpu(), want) and not wide[:, 1::2].any()
        part = torch.zeros(3, 5, dtype=dtype, device=ctx.device)
        ctx.ccl.scatter(part, wide[:, ::2] if rank == root else None, root, group)
        assert torch.equal(part, mine)
    if dtype in (torch.bool, torch.float64, torch.complex128):
        with pytest.raises(DtypeError, match="reduce: inp has dtype"):
            ctx.ccl.reduce(part, mine, 0, group=group)
    else:
        total = torch.zeros(3, 5, dtype=dtype, device=ctx.device)
        ctx.ccl.reduce(total, mine, size - 1, group=group)
        want = torch.stack(of[2]).sum(0).to(dtype) if rank == size - 1 else torch.zeros(3, 5, dtype=dtype)
        assert torch.equal(total.cpu(), want)
    ctx.barrier()


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w != 1])
def test_from_and_to_each_root(world_size, dtype):
    run_ranks(world_size, _rooted, dtype)


def _in_groups(ctx):
    mesh = torch.distributed.device_mesh.init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        group = mesh[name].get_group()
        _rooted(ctx, torch.int64, group, tuple(torch.distributed.get_process_group_ranks(group)))


@pytest.mark.four
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w == 4])
def test_roots_count_in_their_group(world_size):
    run_ranks(world_size, _in_groups)


def _refused(ctx):
    x, whole = torch.zeros(2, 3, device=ctx.device), torch.zeros(2 * ctx.num_ranks, 3, device=ctx.device)
    calls = [
        (ArgumentError, "broadcast: src is 9", lambda: ctx.ccl.broadcast(x, 9)),
        (ArgumentError, "broadcast: tensor is list", lambda: ctx.ccl.broadcast([1.0])),
        (ArgumentError, "gather: dst is True", lambda: ctx.ccl.gather(whole, x, dst=True)),
        (ArgumentError, "scatter: out is NoneType", lambda: ctx.ccl.scatter(None, whole)),
        (ArgumentError, "reduce: op is 'max'", lambda: ctx.ccl.reduce(x, x, op="max")),
        (ArgumentError, "config is dict", lambda: ctx.ccl.broadcast(x, config={})),
        (ArgumentError, "requires grad", lambda: ctx.ccl.broadcast(x.clone().requires_grad_())),
        (ArgumentError, "broadcast: tensor has no memory", lambda: ctx.ccl.broadcast(_freed(x))),
        (ArgumentError, "gather: inp has no memory", lambda: ctx.ccl.gather(whole, _freed(x))),
        (ArgumentError, "scatter: out has no memory", lambda: ctx.ccl.scatter(_freed(x), whole)),
        (ArgumentError, "reduce: inp has no memory", lambda: ctx.ccl.reduce(x, _freed(x))),
        (ArgumentError, "broadcast: tensor .*no expanded", lambda: ctx.ccl.broadcast(x[:1].expand(2, 3))),
        (ArgumentError, "scatter: out .*no expanded", lambda: ctx.ccl.scatter(x[:1].expand(2, 3), whole)),
    ]
    if ctx.cur_rank == 0:  # where it is looked at
        calls += [
            (ShapeError, r"out is \(2, 3\)", lambda: ctx.ccl.gather(x, x) if ctx.num_ranks > 1 else _raise()),
            (ShapeError, "of torch.int32", lambda: ctx.ccl.reduce(x.int(), x)),
            (ArgumentError, "gather: out .*no expanded", lambda: ctx.ccl.gather(x[:1].expand(len(whole), 3), x)),
            (ArgumentError, "reduce: out .*no expanded", lambda: ctx.ccl.reduce(x[:1].expand(2, 3), x)),
        ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    ctx.barrier()


def _freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _raise():
    raise ShapeError("out is (2, 3): one rank gathers its own")


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_bad_arguments_are_refused_before_anybody_waits(world_size):
    run_ranks(world_size, _refused)


def _replayed(ctx):
    rank, n = ctx.cur_rank, ctx.num_ranks
    mine, out = torch.zeros(1000, device=ctx.device), torch.zeros(1000, device=ctx.device)
    whole, total = torch.zeros(n * 1000, device=ctx.device), torch.zeros(1000, device=ctx.device)

    def calls():
        out.copy_(mine)
        ctx.ccl.broadcast(out, n - 1)
        ctx.ccl.gather(whole, mine, 0)
        ctx.ccl.reduce(total, mine, 0)

    calls()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for turn in range(5):
        mine.copy_(_values(rank, 1000, dtype=torch.float32, turn=turn))
        graph.replay()
        of = [_values(r, 1000, dtype=torch.float32, turn=turn) for r in range(n)]
        assert torch.equal(out.cpu(), of[n - 1])
        if rank == 0:
            assert torch.equal(whole.cpu(), torch.cat(of)) and torch.equal(total.cpu(), torch.stack(of).sum(0))
    ctx.barrier()


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_captured_calls_are_replayed(world_size):
    run_ranks(world_size, _replayed)
