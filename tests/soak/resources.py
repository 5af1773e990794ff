"""What processes hold: memory, file descriptors, shared memory, temporary files. As much at the end as before."""

from __future__ import annotations

import gc
import os
from pathlib import Path
import resource
import time
from typing import Any

import iris
import torch

from tests.harness import run_ranks

GROWTH_MIB = 64  # of a rank, for what Python, torch and triton keep of calls that were new to them
GPU_MIB = 64  # of a GPU, for what its driver keeps
_SETTLES_S = 5.0  # in which what other programs have for a moment goes again


def held() -> dict[str, int]:
    """By this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rss_mib": pages * resource.getpagesize() >> 20,
        "device_mib": device >> 20,
    }


def held_by_rank(ctx: iris.Iris) -> dict[str, int]:
    return held() | {"heap_bytes": sum(ctx.heap.used)}


def of_ranks(worlds: list[int]) -> dict[int, list[dict[str, int]]]:
    """By the kept ranks of each world."""
    return {world: run_ranks(world, held_by_rank) for world in worlds}


def shared() -> set[str]:
    """Names in shared memory, but semaphores: the library makes none, and worker pools of others leave theirs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


class Before:
    """What there was when it was made; `after` compares."""

    def __init__(self, temporary: Path, gpus: int) -> None:
        self.temporary, self.gpus = temporary, gpus
        self.free = self._free_mib()  # first, for it may open files
        self.here, self.shared, self.files = held(), shared(), self._files()

    def _files(self) -> set[str]:
        """Without the cache of torch's compiler, which stays on purpose."""
        return {name for name in os.listdir(self.temporary) if not name.startswith("torchinductor_")}

    def _free_mib(self) -> list[int]:
        return [torch.cuda.mem_get_info(gpu)[0] >> 20 for gpu in range(self.gpus)]

    def _taken_mib(self) -> int:
        """Of the GPU that has lost most."""
        return max((was - now for was, now in zip(self.free, self._free_mib(), strict=True)), default=0)

    def after(self) -> tuple[dict[str, Any], list[str]]:
        """Figures, and what is wrong with them."""
        end = time.monotonic() + _SETTLES_S
        while ((more := shared() - self.shared) or self._taken_mib() > GPU_MIB) and time.monotonic() < end:
            time.sleep(0.2)
        now = held()
        left = sorted(self._files() - self.files)
        wrong = [f"{now['descriptors']} file descriptors, {self.here['descriptors']} before"]
        wrong = wrong if now["descriptors"] > self.here["descriptors"] else []
        wrong += [f"left in /dev/shm: {', '.join(sorted(more))}"] if more else []
        wrong += [f"left in the folder for temporary files: {', '.join(left)}"] if left else []
        figures = {
            "descriptors": [self.here["descriptors"], now["descriptors"]],
            "shared_memory_left": len(more),
            "temporary_files_left": len(left),
        }
        if self.gpus:
            figures["gpu_mib_less"] = taken = self._taken_mib()
            wrong += [f"a GPU has {taken} MiB less"] if taken > GPU_MIB else []
        return figures, wrong


def growth(before: dict[int, list[dict]], after: dict[int, list[dict]]) -> tuple[dict[str, Any], list[str]]:
    """Of kept ranks: figures of the rank that grew most, and what is wrong with them."""
    pairs = [each for world in before for each in zip(before[world], after[world], strict=True)]
    names = "descriptors", "rss_mib", "device_mib", "heap_bytes"
    most = {name: max((now[name] - was[name] for was, now in pairs), default=0) for name in names}
    wrong = [f"a rank holds {most[name]} {name} more" for name in names if name != "rss_mib" and most[name] > 0]
    wrong += [f"a rank's memory grew by {most['rss_mib']} MiB"] if most["rss_mib"] > GROWTH_MIB else []
    return {f"most_{name}_more": value for name, value in most.items()}, wrong
