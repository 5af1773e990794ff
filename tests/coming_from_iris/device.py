"""Where programs put tensors: "cuda" in ROCm/iris, which has no interpreter."""

from tests.harness import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"
