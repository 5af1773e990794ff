"""Test reliability by many runs: `python -m tests.soak --seconds 600`, or `make soak` (docs/reliability.md)."""
