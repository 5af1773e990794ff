"""Inductor's kernels launched beside the kernel before (programmatic dependent launch), each of which waits first.

With `triton.enable_pdl` alone, a kernel waits before it touches what the *generated* kernel before it touches, and else
after its first loads, if it has any. It goes by the names of buffers. That is not enough:

- What is written in place has another name for who reads it next: a copy of the cache was made before the kernel that
  writes the cache had ended.
- A kernel that reads nothing waits for nothing, and ends before those before it have. Who waits for it alone, as the
  kernels of our own operators do, or reads what came two kernels before, sees what is not yet written.
- Memory is reused under new names, while the kernel before may still read it.

A kernel that follows what inductor did not generate waits before all that it reads or writes. So here inductor is told
that every kernel does: all wait first, as `arch.follow` has it, and what two kernels do never overlaps.
"""

from __future__ import annotations

from torch._inductor import config, custom_graph_pass
from torch._inductor.scheduler import Scheduler


class _Unfollowed(Scheduler):
    """A scheduler to whose kernels no kernel before is known."""

    previous_node = property(lambda self: None, lambda self, node: None)


class WaitFirst(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """A pass over what is to be generated. Caches of compiled graphs know it by its `uuid`, or pickle it."""

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
    """Of inductor's config. Where its kernels cannot be had to wait first, none is launched so."""
    if not hasattr(config.triton, "enable_pdl"):
        return {}
    if config.cpp_wrapper or config._post_fusion_custom_pass is not None:
        return {"triton.enable_pdl": False}
    return {"triton.enable_pdl": True, "_post_fusion_custom_pass": WaitFirst()}
