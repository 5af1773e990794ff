"""Hand out offsets in a range: first fit, lowest offset first.

The same calls give the same offsets on every rank without communication, because nothing else decides: blocks are freed
by explicit calls only, never when an object dies.
"""

from __future__ import annotations


def rounded(value: int, multiple: int) -> int:
    """Return the next multiple of `multiple` from `value` up."""
    return -(-value // multiple) * multiple


class Offsets:
    def __init__(self, size: int) -> None:
        self.size = size
        """Where the range ends. A caller that shares the range with another allocator moves this before `take`."""
        self.used = 0
        """The end of the last block taken."""
        self._blocks: dict[int, int] = {}  # [begin] = end
        self._holes: list[tuple[int, int]] = []  # [begin, end) below `used`, ascending, never adjacent

    @property
    def free(self) -> int:
        return self.size - self.used + sum(end - begin for begin, end in self._holes)

    @property
    def longest(self) -> int:
        """Return the size of the largest free block, in bytes."""
        return max([self.size - self.used, *(end - begin for begin, end in self._holes)])

    def take(self, nbytes: int, alignment: int) -> int | None:
        """Return the offset of `nbytes` > 0 free bytes, or None."""
        for index, (begin, end) in enumerate(self._holes):
            offset = rounded(begin, alignment)
            if offset + nbytes <= end:
                rest = ((begin, offset), (offset + nbytes, end))
                self._holes[index : index + 1] = [hole for hole in rest if hole[0] < hole[1]]
                break
        else:
            offset = rounded(self.used, alignment)
            if offset + nbytes > self.size:
                return None
            if offset > self.used:
                self._insert(self.used, offset)
            self.used = offset + nbytes
        self._blocks[offset] = offset + nbytes
        return offset

    def give(self, offset: int) -> None:
        """Free the block that begins at `offset`; raise `KeyError` if none does."""
        self._insert(offset, self._blocks.pop(offset))
        if self._holes[-1][1] == self.used:
            self.used = self._holes.pop()[0]

    def _insert(self, begin: int, end: int) -> None:
        holes: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (begin, end)]):
            if holes and holes[-1][1] == hole[0]:
                holes[-1] = holes[-1][0], hole[1]
            else:
                holes.append(hole)
        self._holes = holes
