"""Which part is whose, without ranks: every rank's part is computed here and put together again."""

import itertools

from iris.errors import ArgumentError, ShapeError
from layers.shard import Shard, balanced, chunk, concat, merged, plain, split_heads
import pytest
import torch

WORLDS = range(1, 9)


@pytest.mark.parametrize("total", [0, 1, 2, 3, 5, 8, 130, 257])
def test_chunk_is_torch_chunk(total: int) -> None:
    for world in WORLDS:
        ranges = [chunk(total, world, rank) for rank in range(world)]
        expected = [list(part) for part in torch.arange(total).chunk(world)]
        expected += [[]] * (world - len(expected))
        if total == 0:  # torch gives one empty chunk
            expected = [[]] * world
        assert [list(range(*r)) for r in ranges] == [[int(i) for i in part] for part in expected]


@pytest.mark.parametrize("total", [0, 1, 3, 9, 130])
def test_balanced_covers_all_once_in_even_parts(total: int) -> None:
    for world in WORLDS:
        ranges = [balanced(total, world, rank) for rank in range(world)]
        assert [i for r in ranges for i in range(*r)] == list(range(total))
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= 1


HEADS = [(g * kv, kv) for g, kv in itertools.product([1, 2, 3, 4, 7], [1, 2, 3, 4, 5, 8])]


@pytest.mark.parametrize("num_heads, num_kv_heads", HEADS)
def test_split_heads_serves_each_query_head_once_with_its_own_kv_head(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for world in WORLDS:
        splits = [split_heads(num_heads, num_kv_heads, world, rank) for rank in range(world)]
        owned = [head for split in splits if not split.idle for head in range(*split.q)]
        assert owned == list(range(num_heads))
        for split in splits:
            assert split.num_local_heads >= 1 and split.num_local_kv_heads >= 1
            # what repeat_kv does: local kv head i serves local query heads i * groups up to (i + 1) * groups
            assert split.num_local_heads == split.num_local_kv_heads * split.groups
            for i, head in enumerate(range(*split.q)):
                assert split.kv[0] + i // split.groups == head // group


def test_idle_ranks_are_padded_with_zeros_at_the_output() -> None:
    splits = [split_heads(2, 2, 4, rank) for rank in range(4)]
    assert [split.idle for split in splits] == [False, True, False, True]
    whole = torch.randn(6, 2 * 4)
    locals_ = []
    for split in splits:
        local = torch.full((6, split.o_shard(4).size), float("nan"))
        split.o_shard(4).fill(local, whole, dim=1)
        assert local.shape[1] == split.q_shard(4).size
        locals_.append(local)
    assert not locals_[1].any() and not locals_[3].any()
    assert torch.equal(torch.cat([locals_[0], locals_[2]], 1), whole)


@pytest.mark.parametrize("heads, kv", [(3, 2), (4, 0)])
def test_split_heads_refuses_heads_that_do_not_group(heads: int, kv: int) -> None:
    with pytest.raises(ShapeError, match=f"num_heads is {heads}.*{kv}"):
        split_heads(heads, kv, 2, 0)


@pytest.mark.parametrize("rank, world", [(-1, 2), (2, 2), (0, 0)])
def test_rank_outside_the_world_is_refused(rank: int, world: int) -> None:
    for split in (lambda: chunk(4, world, rank), lambda: split_heads(4, 2, world, rank), lambda: plain(4, world, rank)):
        with pytest.raises(ArgumentError, match="expected 0 <= rank"):
            split()


@pytest.mark.parametrize("dim", [0, 1])
def test_fill_takes_the_ranges_in_order_then_pads(dim: int) -> None:
    whole = torch.arange(60.0).view(10, 6) if dim == 0 else torch.arange(60.0).view(6, 10)
    shard = Shard(10, ((7, 9), (3, 3), (0, 2)), pad=1)
    assert shard.size == 5
    local = torch.full((5, 6) if dim == 0 else (6, 5), -1.0)
    shard.fill(local, whole, dim)
    expected = whole.index_select(dim, torch.tensor([7, 8, 0, 1]))
    assert torch.equal(local.narrow(dim, 0, 4), expected)
    assert not local.narrow(dim, 4, 1).any()


@pytest.mark.parametrize("sizes", [(130, 130), (5, 2, 2), (1, 7)])
def test_merged_splits_each_output_or_the_whole(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(sum(sizes))
    for world in WORLDS:
        for rank in range(world):
            parts = merged(sizes, world, rank, gathered=False)
            assert [part.ranges[0] for part in parts] == [chunk(size, world, rank) for size in sizes]
            together = concat(merged(sizes, world, rank, gathered=True))
            local = torch.empty(together.size, dtype=whole.dtype)
            together.fill(local, whole, 0)
            assert torch.equal(local, whole[slice(*chunk(sum(sizes), world, rank))])
