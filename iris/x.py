"""Not here: ROCm/iris's collectives on tiles inside kernels. Importing it says what to use."""

raise ImportError(
    "iris.x is ROCm/iris's; expected iris.tiles inside kernels, ctx.ccl outside, here (docs/guides/coming-from-iris.md)"
)
