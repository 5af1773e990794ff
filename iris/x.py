"""Refuse ROCm/iris's collectives on tiles inside kernels: importing this names the replacement."""

raise ImportError(
    "iris.x is ROCm/iris's; expected iris.tiles inside kernels, ctx.ccl outside, here (docs/guides/coming-from-iris.md)"
)
