"""The cases of one benchmark: its contenders on one rank, its kernels, its models, and the expected results."""
