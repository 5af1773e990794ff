"""Distinguish a process without a free file descriptor from a lost peer: either may be why two ranks cannot connect."""

from __future__ import annotations

import errno
import os
import resource


def lacking(least: int) -> str:
    """Return the reason why this process cannot open `least` more files; "" if it can."""
    opened: list[int] = []
    try:
        while len(opened) < least:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return f"{least} more files are needed and {len(opened)} can be opened; {remedy()}"
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""


def is_lacking(error: BaseException) -> bool:
    """Return whether `error` means that this process ran out of file descriptors."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def remedy() -> str:
    """Return the sentence that explains how to get more file descriptors."""
    return f"too many are open: raise `ulimit -n`, which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
