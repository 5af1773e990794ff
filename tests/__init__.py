"""Limit each test process to one thread: tests run in parallel, and more threads than cores slow all of them down."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch ask
