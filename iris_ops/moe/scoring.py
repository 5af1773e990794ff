"""`Scoring`, the function from a router's logits to the experts of a token and their weights."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from iris.errors import ArgumentError

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = "softmax", "sigmoid", "softmax_of_chosen"
KINDS = (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN)


@dataclass(frozen=True)
class Scoring:
    """Describe how a router's logits become the weights of the experts that it chooses.

    Args:
        kind: "softmax" of all logits, "softmax_of_chosen" of the chosen ones alone, or "sigmoid" of each.
        normalised: whether the weights are divided by the sum of the chosen ones plus `epsilon`.
        epsilon: is added to that sum.
        scale: a factor of the weights.
        groups: into how many groups of equal size the experts are divided; 1 for none.
        kept_groups: only experts of that many best groups are chosen.
        group_best: a group's score is the sum of that many of its highest scores, 1 or 2.

    Raises:
        ArgumentError: for bad fields.
    """

    kind: str = SOFTMAX
    normalised: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"scoring.kind is {self.kind!r}; expected one of {', '.join(map(repr, KINDS))}")
        if not 1 <= self.kept_groups <= self.groups or self.group_best not in (1, 2):
            raise ArgumentError(
                f"scoring.kept_groups is {self.kept_groups}, scoring.groups {self.groups} and scoring.group_best "
                f"{self.group_best}; expected kept_groups from 1 to groups, and group_best 1 or 2"
            )

    def refusal(self, experts: int, top_k: int) -> str | None:
        """Return why the kernel cannot choose `top_k` of `experts` experts.

        Args:
            experts: E, the number of experts.
            top_k: the number of experts of a token.

        Returns:
            The reason, or None if the kernel can.
        """
        size = experts // self.groups
        if not 1 <= top_k <= experts:
            return f"top_k is {top_k}; expected 1 to {experts}"
        if self.groups > 1 and (size * self.groups != experts or size & (size - 1) or self.groups & (self.groups - 1)):
            return f"{experts} experts are in {self.groups} groups; expected powers of two"
        if self.groups > 1 and (size < self.group_best or top_k > size * self.kept_groups):
            chosen = f"{top_k} are chosen from {self.kept_groups} groups by {self.group_best} scores"
            return f"groups have {size} experts, and {chosen}; expected larger groups"
        return None

    @property
    def text(self) -> str:
        """Return the scoring as a string, which operators take and `from_text` reads."""
        return " ".join(map(repr, astuple(self)))


def from_text(text: str) -> Scoring:
    """Return the scoring that `text` spells."""
    kind, normalised, epsilon, scale, *groups = text.split()
    return Scoring(kind[1:-1], normalised == "True", float(epsilon), float(scale), *map(int, groups))
