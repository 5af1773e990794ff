"""Report failures under torchrun: one rank prints, and torchrun's summary ends with its line.

Each process that torchrun starts prints its own copy of an error, and torchrun then prints a separate screen, whose
last line is the traceback of the first failure. It reads that from the file that TORCHELASTIC_ERROR_FILE names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import sys
import time

_RANK_0_FIRST_S = 3.0


def started_by_torchrun() -> bool:
    """Return whether this process is a rank that torchrun, or another launcher of its kind, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def report_failure(line: str) -> None:
    """Print `line` to stderr, on rank 0 only, and leave it for the summary with which torchrun ends.

    The other ranks wait a moment: torchrun kills all ranks when the first one has ended.
    """
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(_RANK_0_FIRST_S)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        cause = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": cause}))
