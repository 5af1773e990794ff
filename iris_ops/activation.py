"""`Activation`, the function between the two products of an expert."""

from __future__ import annotations

from dataclasses import dataclass

from iris.errors import ArgumentError

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class Activation:
    """Describe the function of an expert: `f(gate) * (up + shift)`, or `f(x)` without a gate; in float32, rounded once.

        kind           f(x)
        "silu"         x * sigmoid(alpha * x), with alpha 1 the SwiGLU of Llama, Mixtral and Qwen
        "gelu"         x * Phi(x), the exact one
        "gelu_tanh"    the approximation by tanh
        "relu2"        max(x, 0) ** 2

    Args:
        kind: the name of f.
        alpha: a factor inside the sigmoid of "silu".
        limit: an upper bound of gate (or x); up is between its negative and itself. None: no bound.
        shift: added to up.

    Raises:
        ArgumentError: for bad fields.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"Activation.kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.kind != "silu" and self.alpha != 1.0:
            raise ArgumentError(f"Activation.alpha is {self.alpha!r} for {self.kind}; expected 1.0, for all but silu")
        if self.limit is not None and not self.limit > 0:
            raise ArgumentError(f"Activation.limit is {self.limit!r}; expected None or a number above 0")


GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, shift=1.0)
_NAMED = {kind: Activation(kind) for kind in KINDS} | {"gpt_oss": GPT_OSS}


def activation_of(given: str | Activation) -> Activation:
    """Return the activation that `given` is or names. Raises `ArgumentError` for any other."""
    activation = given if isinstance(given, Activation) else _NAMED.get(given) if isinstance(given, str) else None
    if activation is None:
        raise ArgumentError(f"activation is {given!r}; expected an Activation or one of {', '.join(_NAMED)}")
    return activation
