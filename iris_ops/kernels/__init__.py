"""The kernels of fused ops. Each module has a kernel, and below it the launcher that names its arguments."""
