"""Places on a heap: taken, given back, never twice."""

import random

from iris.memory.offsets import Offsets
import pytest


def test_offsets_never_overlap_and_come_back_whole():
    for seed in range(20):
        draw, offsets, taken = random.Random(seed), Offsets(5000), {}
        for _ in range(400):
            if taken and draw.random() < 0.45:
                begin = draw.choice(sorted(taken))
                offsets.give(begin)
                del taken[begin]
            else:
                nbytes, alignment = draw.randint(1, 400), draw.choice([1, 16, 128])
                begin = offsets.take(nbytes, alignment)
                if begin is None:
                    continue
                assert begin % alignment == 0 and 0 <= begin and begin + nbytes <= 5000
                assert all(begin + nbytes <= other or end <= begin for other, end in taken.items())
                taken[begin] = begin + nbytes
            assert offsets.free == 5000 - sum(end - begin for begin, end in taken.items())
            assert offsets.used == max(taken.values(), default=0)
        with pytest.raises(KeyError):
            offsets.give(4999)
        for begin in list(taken):
            offsets.give(begin)
        assert offsets.take(5000, 1) == 0 and offsets.take(1, 1) is None
