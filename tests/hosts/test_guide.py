"""The commands of docs/guides/several-hosts.md, as they stand there: the demo's model on two hosts, by both meshes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
import fcntl
import os
from pathlib import Path
import re
import signal
import subprocess
import tempfile

import pytest

from tests.hosts.namespaces import needs_namespaces
from tests.processes import ROOT, patient

pytestmark = [needs_namespaces(), pytest.mark.slow]

_SETUP, _FIRST, _SECOND = re.findall(
    r"```bash\n((?:# .*?\n)?ip .*?)```", (ROOT / "docs" / "guides" / "several-hosts.md").read_text(), re.DOTALL
)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    lock = open(Path(tempfile.gettempdir(), "iris-guide-namespaces"), "w")  # noqa: SIM115  # held by the process
    fcntl.flock(lock, fcntl.LOCK_EX)
    existing = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    if {"hosta", "hostb"} & set(existing):
        pytest.skip("the guide's namespaces are there already")
    subprocess.run(["sh", "-e", "-c", _SETUP], check=True)
    try:
        yield
    finally:
        for name in ("hosta", "hostb"):
            subprocess.run(["ip", "netns", "del", name], check=True)
        lock.close()


@pytest.mark.parametrize("options", ["--mesh pp", "--mesh dp", "--mesh pp --engine"])
def test_the_demo_s_model_on_two_hosts(two_hosts: None, options: str) -> None:
    commands = [command.replace("--mesh pp", options) for command in (_SECOND, _FIRST)]
    started = [
        subprocess.Popen(
            ["sh", "-c", command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        second, first = (process.communicate(timeout=patient(300))[0] for process in started)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0, 0], first + second
    assert "match: yes" in first, first
    layers = 15 if "pp" in options else 30
    assert f"host hosta: {layers} layers on 2 of 4 ranks" in first
    assert f"host hostb: {layers} layers on 2 of 4 ranks" in second
