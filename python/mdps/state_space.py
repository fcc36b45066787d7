"""What the numbers of a state mean: names, and which of them are angles."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpace:
    """A state is a vector of linear dimensions followed by angular ones (radians); the order of the names is its layout.

    Example: `StateSpace(linear=("x", "y"), angular=("heading",))` describes states (x, y, heading), size 3.

    Raises:
        ValueError: no dimension at all, more than 16, or a name that occurs twice.
    """

    linear: tuple[str, ...] = ()
    angular: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("linear", "angular"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                raise TypeError(f"{field}: expected a tuple of names, got {value!r}")
            object.__setattr__(self, field, tuple(value))
        if not 1 <= self.size <= 16:
            raise ValueError(f"expected states of 1 to 16 dimensions, got {self.size}")
        if len(set(self.names)) < self.size:
            raise ValueError(f"expected names that differ, got {self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order of the state's dimensions."""
        return self.linear + self.angular

    @property
    def size(self) -> int:
        """D, the number of dimensions."""
        return len(self.linear) + len(self.angular)

    @property
    def n_angular(self) -> int:
        """A, the number of angles; they are the last dimensions."""
        return len(self.angular)

    def index(self, names: str | Iterable[str]) -> list[int]:
        """Return the dimensions that have these names (one name, or several), in the order given.

        Raises:
            ValueError: a name that this space does not have.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            if name not in self.names:
                raise ValueError(f"names: expected some of {self.names}, got {name!r}")
        return [self.names.index(name) for name in names]

    def subspace(self, names: str | Iterable[str]) -> "StateSpace":
        """Return the space of these dimensions alone, in the order that they have here."""
        kept = set(self.index(names))
        return StateSpace(
            tuple(n for i, n in enumerate(self.linear) if i in kept),
            tuple(n for i, n in enumerate(self.angular, len(self.linear)) if i in kept),
        )

    def wrap(self, states: Tensor) -> Tensor:
        """Return states (..., D) with the angles moved by whole turns to [-pi, pi), up to the rounding of the dtype.

        Angles that are in that range already keep every bit. The gradient is 1.
        """
        if not self.angular:
            return states
        with torch.no_grad():
            turns = (states * (0.5 / math.pi)).add_(0.5).floor_()
            turns[..., : len(self.linear)] = 0
        return torch.sub(states, turns, alpha=2 * math.pi)

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a - b (..., D), the angles by the shorter way round: [-pi, pi)."""
        return self.wrap(a - b)

    def mean(self, states: Tensor, log_weights: Tensor) -> Tensor:
        """Return the weighted mean (..., D) of states (..., N, D), circular where angular.

        Args:
            states: (..., N, D).
            log_weights: (..., N), normalised.

        The mean of an angle is the direction of the weighted sum of unit vectors, in [-pi, pi]. Where that sum vanishes
        every direction is as good as another: the result is arbitrary, and finite.
        """
        weights = log_weights.exp().unsqueeze(-1)
        linear = (weights * states[..., : len(self.linear)]).sum(-2)
        if not self.angular:
            return linear
        angles = states[..., len(self.linear) :]
        return torch.cat([linear, torch.atan2((weights * angles.sin()).sum(-2), (weights * angles.cos()).sum(-2))], -1)
