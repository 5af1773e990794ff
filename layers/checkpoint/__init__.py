"""Read and write checkpoints.

Each rank reads its slices only. A save that is killed leaves the old checkpoint or the new one.
"""
