"""Planted faults: does the test suite notice when one line of the synchronisation is wrong?

    python -m tests.planted                     every fault, by the tests that `make test` runs
    python -m tests.planted "an epoch may be 0"     some faults, by name
    python -m tests.planted --share 1/3         a third of the faults

Each fault is planted in a copy of this checkout, and its tests run until one fails. A run that does not end counts as
caught: a rank waits in vain, and a test would say so after its time-out. A fault that no test notices is a hole.
"""
