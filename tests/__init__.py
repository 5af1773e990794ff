"""Tests run beside each other, so a process has one thread: several wait for each other busily where cores are few."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch ask
