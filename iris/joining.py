"""Join the ranks of a context to their counterparts on other hosts. A loss on either side ends the calls of both.

A rank that leaves its context by an exception notes that for the other hosts. `Across` ends the calls of the context
when another host is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from .across import Across, Rate
from .errors import ArgumentError
from .group import Ranks, resolve

if TYPE_CHECKING:
    from .group import Members
    from .rank import Rank


def connect(group: dist.ProcessGroup, ctx: Rank) -> Across:
    """Return the members of `group` for the ranks of `ctx`, where a loss on either side ends the calls of both.

    Collective.
    """
    line = Across(group, ctx.leave_for, ctx.lost_inside)
    ctx.on_leave.append(line.leave)
    return line


def join(across: Members, ranks: Ranks, ctx: Rank) -> tuple[Across, Rate] | None:
    """Return this rank's group across hosts and its rate; None without one. Collective.

    Raises `ArgumentError` on every rank unless `across` joins ranks with the same number in contexts of the same size.
    """
    group = ranks.together("the group across hosts", lambda: None if across is None else resolve(across))
    has_group = [other_group is not None for other_group in ranks.all_gather(None if group is None else True)]
    if not all(has_group):
        if any(has_group):
            raise ArgumentError(
                "across is None on some ranks of a context: expected a group on all of them, or on none of them"
            )
        return None
    assert group is not None
    line = connect(group, ctx)
    places = line.exchange("the places of ranks", (ranks.rank, ranks.size))
    lines = ranks.all_gather((line.rank, line.size, places == [[ranks.rank, ranks.size]] * line.size))
    if len(set(lines)) > 1 or not lines[0][2]:
        raise ArgumentError(
            f"across connects rank {ranks.rank} of {ranks.size} with {places} (rank, number of ranks): expected the "
            f"same rank and the same number of ranks on each host, as mesh['hosts'] with group=mesh['tp'] gives them"
        )
    own = line.measure(ctx.device)
    rates = ranks.all_gather((own.gbs, own.hop_us))
    return line, Rate(min(gbs for gbs, _ in rates), max(hop for _, hop in rates))
