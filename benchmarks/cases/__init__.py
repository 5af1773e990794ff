"""What one benchmark measures: its contenders on one rank, its kernels, its models, and what is right."""
