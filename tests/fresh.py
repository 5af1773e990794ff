"""Run programs that test imports, each in a new process in which only torch has been imported.

The processes are forked from one that has imported torch, which would take most of a program's time.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys

from tests.processes import ROOT, patient, python_path

_SERVER = """
import json, os, sys, tempfile, traceback
import torch

for line in sys.stdin:
    code, variables = json.loads(line)
    printed = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(printed, 1):
            os.dup2(file.fileno(), number)
        os.environ.update(variables)
        status = 0
        try:
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in printed:
        file.seek(0)
    answer = [status, *(file.read().decode() for file in printed)]
    print(json.dumps(answer), flush=True)
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    """Return a program's exit status, which is 1 after an exception, and its output.

    Triton's interpreter is on only if `variables` enable it.
    """
    server = _server()
    server.stdin.write(json.dumps([code, variables]) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], patient(120))[0]:
        server.kill()
        _server.cache_clear()
        raise TimeoutError(f"a program does not end:\n{code}")
    status, out, err = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(code, status, out, err)


@functools.cache
def _server() -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server
