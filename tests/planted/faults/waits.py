"""What bounds the hosts' waits, and what tells all ranks where one fails or leaves."""

from .fault import Fault

_WAITS = "tests/iris/test_lost_ranks.py::test_who_waits_for_a_lost_rank_names_it"
_WATCHED = "tests/iris/test_lost_ranks.py::test_processes_and_their_connections_are_both_watched"
_MAKING = "tests/iris/test_lost_ranks.py::test_a_rank_lost_while_a_context_is_made_is_named"
_CREATION = "tests/iris/test_creation.py::test_no_rank_fails_alone_while_a_context_is_made"
_STRANGERS = ("tests/iris/test_channel.py::test_strangers_are_turned_away",)
_CAPTURE = ("tests/iris/test_captures.py",)

WAITS = [
    Fault(
        "hosts wait for half an hour",
        "iris/channel.py",
        "        deadline = time.monotonic() + timeout_s\n        sending",
        "        deadline = time.monotonic() + max(timeout_s, 1800)\n        sending",
        tuple(f"{_WAITS}[{wait}-stop]" for wait in ("broadcast from it", "memory_pool", "growth")),
    ),
    Fault(
        "hosts do not see that a connection has ended",
        "iris/channel.py",
        "                    except OSError as error:\n                        closed =",
        "                    except OSError as error:\n"
        "                        selector.unregister(key.fileobj)\n"
        "                        continue\n"
        "                        closed =",
        (f"{_WATCHED}[closed]",),
    ),
    Fault(
        "hosts do not look whether the awaited processes live",
        "iris/channel.py",
        "                    gone = [peer for peer in waited if has_ended(self.pids[peer])]\n",
        "                    gone = []\n",
        (f"{_WATCHED}[outlived]",),
    ),
    Fault(
        "who gives up on a rank tells nobody",
        "iris/channel.py",
        "        self.tell(_LOST, (peer, reason))\n",
        "",
        ("tests/iris/test_lost_ranks.py::test_who_gives_up_on_a_rank_tells_the_others",),
    ),
    Fault(
        "a broadcast takes each rank's own source",
        "iris/group.py",
        "        if len({source for source, _ in told}) > 1:\n",
        "        if False:\n",
        ("tests/iris/test_lost_ranks.py::test_sources_that_differ_are_an_error_on_all",),
    ),
    Fault(
        "who makes a context waits for half an hour",
        "iris/meeting.py",
        "    end = time.monotonic() + limit_s\n    look.start()\n",
        "    end = time.monotonic() + max(limit_s, 1800)\n    look.start()\n",
        (f"{_MAKING}[before-False-stop]",),
    ),
    Fault(
        "who makes a context does not look whether the others live",
        "iris/meeting.py",
        "            if peer != rank and pid and has_ended(pid):\n",
        "            if False:\n",
        (f"{_MAKING}[connected-True-kill]", f"{_MAKING}[between the meeting and its calls-True-kill]"),
    ),
    Fault(
        "a process group is made in its own time",
        "iris/meeting.py",
        "is_master=rank == 0, wait_for_workers=False, timeout=limit)\n",
        "is_master=rank == 0, wait_for_workers=False)\n",
        ("tests/iris/test_lost_ranks.py::test_a_first_rank_that_never_comes_is_named",),
    ),
    Fault(
        "silent strangers are waited for in turn",
        "iris/channel.py",
        "                                caller.setblocking(False)\n",
        "                                caller.settimeout(5.0)\n"
        "                                caller.recv(1, socket.MSG_PEEK)\n"
        "                                caller.setblocking(False)\n",
        _STRANGERS,
    ),
    Fault(
        "who waits for callers does not look whether they live",
        "iris/channel.py",
        "gone = [peer for peer in missing if has_ended(self.pids[peer])]\n                    if gone or",
        "gone = []\n                    if gone or",
        ("tests/iris/test_creation.py::test_nothing_stays_of_a_rank_that_is_killed_while_a_context_is_made",),
    ),
    Fault(
        "a rank without a device fails alone",
        "iris/context.py",
        'ranks.together("the device", self._own_device)',
        "self._own_device()",
        (f"{_CREATION}[the device]",),
    ),
    Fault(
        "a rank that cannot furnish its context fails alone",
        "iris/context.py",
        'ranks.together("the memory", self._furnish)',
        "self._furnish()",
        (f"{_CREATION}[the barrier]",),
    ),
    Fault(
        "a rank without shared memory fails alone",
        "iris/memory/shared_memory.py",
        'mine = ranks.together("allocating the heap", make)',
        "mine = make()",
        (f"{_CREATION}[memfd_create]",),
    ),
    Fault(
        "a rank that cannot map a peer fails alone",
        "iris/memory/shared_memory.py",
        'self._maps = ranks.together("mapping the heaps", map_peers)',
        "self._maps = map_peers()",
        (f"{_CREATION}[mapping a peer]",),
    ),
    Fault(
        "a rank with a group of its own fails alone",
        "iris/group.py",
        '        self.together("the group", lambda: _raised(refusal))\n',
        "        _raised(refusal)\n",
        (f"{_CREATION}[the group]",),
    ),
    Fault(
        "an interrupt is not told",
        "iris/group.py",
        "            self.leave(error)\n            raise",
        "            raise",
        ("tests/iris/test_lost_ranks.py::test_an_interrupt_while_a_context_is_made_reaches_all",),
    ),
    Fault(
        "a barrier comes before the user's error",
        "iris/context.py",
        "        if error is None or self._closed:\n            self.close()",
        "        if True:\n            self.close()",
        (f"{_WAITS}[barrier-raise]", "tests/iris/test_creation.py::test_an_exception_on_all_ranks_is_the_users"),
    ),
    Fault(
        "who leaves by an error tells no host",
        "iris/context.py",
        "            self.hosts.leave(error)\n",
        "",
        (f"{_WAITS}[growth-raise]",),
    ),
    Fault(
        "who leaves by an error tells no kernel",
        "iris/context.py",
        "                    theirs.copy_(left, non_blocking=True)\n",
        "                    pass\n",
        (f"{_WAITS}[barrier-raise]",),
    ),
    Fault(
        "memory is allocated while a graph is captured",
        "iris/heap.py",
        "        if platform.is_capturing(self._segment.local.device):\n            raise CaptureError(f",
        "        if False:\n            raise CaptureError(f",
        _CAPTURE,
    ),
    Fault(
        "memory is freed while a graph is captured",
        "iris/heap.py",
        "        if platform.is_capturing(self._segment.local.device):\n            raise CaptureError(\n",
        "        if False:\n            raise CaptureError(\n",
        _CAPTURE,
    ),
    Fault(
        "memory is mapped while a graph is captured",
        "iris/memory/vmem.py",
        "        if platform.is_capturing(self._device):\n",
        "        if False:\n",
        _CAPTURE,
    ),
    Fault(
        "a tool that serialises kernels is not named",
        "iris/failures.py",
        "had passed{platform.serialised()}. {void}",
        "had passed. {void}",
        ("tests/iris/test_lost_ranks.py::test_a_tool_that_serialises_kernels_is_mentioned",),
    ),
    Fault(
        "who loads keeps what fails to itself",
        "layers/together.py",
        "    lines = _by_rank([ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)])\n",
        "    lines = _by_rank([own])\n",
        ("tests/layers/test_bad_checkpoints.py::test_a_problem_of_one_rank_names_it",),
    ),
    Fault(
        "who generates keeps what it refuses to itself",
        "layers/together.py",
        "        return ctx.hosts.together(call, check)\n",
        "        return check()\n",
        ("tests/layers/test_generation.py::test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry",),
    ),
]
