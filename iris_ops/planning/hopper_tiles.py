"""The tiles of the warp-specialised kernels on Hopper, measured on H200s; see `tiles.Tiles`.

Another architecture is another file like this one, under its name in `tile_model.SPECIALISED_TILES`. The kernels differ
in what their mover warps do meanwhile. That takes registers, shared memory and issue cycles from the MMA warps, so each
has separate tiles and rates.
"""

from __future__ import annotations

from .tiles import SpecialisedTiles

HOPPER = SpecialisedTiles(
    overlapped={(128, 256, 64, 8): (3, 1.03), (128, 128, 64, 8): (5, 0.95)},
    copy_gather={(128, 256, 64, 8): (3, 1.03), (128, 128, 64, 8): (5, 0.99)},
    two_shot={(128, 128, 64, 8): (5, 0.95), (64, 128, 64, 8): (7, 0.73)},
    scaled={
        "copy_gather": {(128, 256, 64, 8): (3, 0.92), (128, 128, 64, 8): (5, 0.68)},
        "overlapped": {(128, 256, 64, 8): (3, 0.92), (128, 128, 64, 4): (5, 0.8)},
        "two_shot": {(128, 128, 64, 8): (5, 0.7), (64, 128, 64, 8): (7, 0.5)},
        "one_shot": {(128, 128, 64, 4): (5, 0.77)},
    },
    widened={
        "copy_gather": {
            (64, 64, 128, 4): (5, 0.45),
            (128, 64, 128, 4): (4, 0.72),
            (128, 128, 128, 8): (3, 0.92),
            (256, 128, 64, 8): (3, 1.1),
        },
        "overlapped": {(128, 128, 128, 8): (3, 0.88), (256, 128, 64, 8): (3, 1.0)},
        "two_shot": {(128, 128, 128, 8): (3, 0.84), (64, 128, 128, 8): (4, 0.5)},
        "one_shot": {
            (64, 64, 128, 4): (5, 0.45),
            (128, 64, 128, 4): (4, 0.7),
            (64, 128, 128, 8): (3, 0.5),
            (128, 128, 128, 8): (2, 0.87),
        },
    },  # fmt: skip
    pair={
        1: {(128, 128, 64, 8): (5, 1.03), (64, 128, 64, 8): (8, 0.77)},
        2: {(128, 128, 64, 8): (5, 1.0), (64, 128, 64, 4): (8, 0.80)},
    },
)
