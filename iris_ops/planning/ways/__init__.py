"""The table of all ways. Of two with the same time, the first is taken."""

from __future__ import annotations

from ..way import Way
from .copy_engines import Brought, CopyGather
from .hopper_lamport import LamportPair, LamportPairScatter, LamportTwoShot
from .hopper_overlapped import HopperGather, HopperReduce
from .lamport import Lamport, LamportGather
from .mixtures import Combine, Down, DownInSteps, GroupedFew, GroupedMany, Token
from .overlapped import Gather, GatherFirst, Reduce
from .sequential import Sequential
from .touched import TouchedDown, TouchedStream
from .tree import Tree
from .weight_stream import WeightStream
from .widened import WidenedMatmul

WAYS: tuple[Way, ...] = (
    Lamport(),
    LamportGather(),
    Tree(),
    WeightStream(),
    Reduce(),
    Gather(),
    GatherFirst(),
    HopperReduce(),
    HopperGather(),
    LamportTwoShot(),
    LamportPair(),
    LamportPairScatter(),
    Brought(),
    Sequential(),
    CopyGather(),
    GroupedFew(),
    GroupedMany(),
    Token(),
    Down(),
    Combine(),
    DownInSteps(),
    TouchedStream(),
    TouchedDown(),
    WidenedMatmul(),
)
