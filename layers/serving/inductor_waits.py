"""Launch inductor's kernels with programmatic dependent launch (PDL), each of which waits first for its predecessor.

With `triton.enable_pdl` alone, a kernel waits before it accesses buffers of the preceding *generated* kernel, and else
after its first loads, if it has any. It compares names of buffers. That is not enough:

- A buffer written in place has another name for its next reader: a copy of the cache was made before the kernel that
  writes the cache had ended.
- A kernel that reads nothing waits for nothing, and may end before its predecessors. A kernel that waits for it alone,
  as those of our own operators do, or that reads a result from two kernels before, sees data that is not yet written.
- Memory is reused under new names, while the preceding kernel may still read it.

A kernel that follows one that inductor did not generate waits before all its loads and stores. So this pass makes
every kernel such a one: all wait first, as with `arch.follow`, and the work of two kernels never overlaps.
"""

from __future__ import annotations

from torch._inductor import config, custom_graph_pass
from torch._inductor.scheduler import Scheduler


class _Unfollowed(Scheduler):
    """A scheduler that records no predecessor of any kernel."""

    previous_node = property(lambda self: None, lambda self, node: None)


class WaitFirst(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """A pass over the nodes to be generated. Caches of compiled graphs know it by its `uuid`, or pickle it."""

    def __init__(self) -> None:
        self._source = custom_graph_pass.get_hash_for_files((__file__,))

    def __call__(self, nodes: list) -> list:
        for scheduler in {node.scheduler for node in nodes}:
            if "previous_node" not in vars(scheduler) or type(scheduler) is not Scheduler:
                config.triton.enable_pdl = False  # inside a patch, which takes it back
            else:
                scheduler.__class__ = _Unfollowed
        return nodes

    def uuid(self) -> bytes:
        return self._source


def patches() -> dict[str, bool | WaitFirst]:
    """Return patches of inductor's config. Where its kernels cannot be made to wait first, disable PDL."""
    if not hasattr(config.triton, "enable_pdl"):
        return {}
    if config.cpp_wrapper or config._post_fusion_custom_pass is not None:
        return {"triton.enable_pdl": False}
    return {"triton.enable_pdl": True, "_post_fusion_custom_pass": WaitFirst()}
