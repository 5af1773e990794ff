"""Planted faults: does the test suite notice when one line of the library is wrong?

    python -m tests.planted                            every fault, by the tests that `make test` runs
    python -m tests.planted --at 017858a --marks "not gpu" --out before.json
    python -m tests.planted "what is sent may be the sentinel"  some faults, by name
    python -m tests.planted --gpus 2                   the faults that only GPUs see

`faults/` lists the faults: each replaces one text in one file, and names the test files, or the tests, that should fail
then. The tool first runs all of these without a fault; where one fails, nothing is judged by it. Then it plants one
fault at a time in a copy of a commit, never in your checkout, runs the fault's tests until the first one fails, and
writes what happened as JSON. A run that does not end counts as caught: a rank waits in vain, and a test would say so
after its time-out.

A fault that no test notices is a hole. Add a cheap test, or say in the fault's `missed` why no CPU can see it.
"""
