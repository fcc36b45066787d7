"""Beliefs: kernel density mixtures over a state space, and the bandwidths that are learned for them.

Source: equation (regularized_pf_density) of "Learning to be Smooth": m(x) = sum_i w_i K(x - x_i; bandwidth), where K is a
product of Gaussian kernels (linear dimensions) and von Mises kernels (angles).
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from . import ops
from .state_space import StateSpace


class Mixture(Distribution):
    """A mixture of N kernels for every element of a batch, as a torch distribution.

    Batch shape (...), for the beliefs of filters (B, T); event shape (D,). Gradients reach means, log-weights and bandwidths.

    Args:
        means: (..., N, D), float32 or float64; angles in radians.
        log_weights: (..., N), normalised (their exponentials sum to 1); -inf is a component that takes no part.
        bandwidths: (D) or (..., D), positive: standard deviations in the units of the state; for an angle b radians means
            a von Mises kernel of concentration b**-2.
        space: names the D dimensions and says which of them are angles.
        validate_args: True also checks, here, that log_weights are normalised and, in methods, that arguments are within the
            support; on a GPU that waits for it.

    Raises:
        ValueError: shapes that do not fit one another or the space; with validate_args, log_weights that are not normalised.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector

    def __init__(
        self, means: Tensor, log_weights: Tensor, bandwidths: Tensor, space: StateSpace, validate_args: bool = False
    ) -> None:
        if means.dim() < 2 or means.size(-1) != space.size:
            raise ValueError(f"means: expected shape (..., N, D) with D = {space.size}, got {tuple(means.shape)}")
        if log_weights.shape != means.shape[:-1]:
            raise ValueError(f"log_weights: expected shape {tuple(means.shape[:-1])}, got {tuple(log_weights.shape)}")
        batch, event = means.shape[:-2], means.shape[-1:]
        if bandwidths.shape != event and bandwidths.shape != batch + event:
            raise ValueError(
                f"bandwidths: expected shape {tuple(event)} or {tuple(batch + event)}, got {tuple(bandwidths.shape)}"
            )
        if validate_args and not ((log_sums := log_weights.detach().logsumexp(-1)).abs() < 1e-3).all():
            expected = "normalised ones, log-sums of 0 (see mdps.ops.normalize_log_weights)"
            raise ValueError(f"log_weights: expected {expected}, got {log_sums.min():.3g} to {log_sums.max():.3g}")
        self.means, self.log_weights, self.bandwidths, self.space = means, log_weights, bandwidths, space
        super().__init__(batch, event, validate_args)

    @property
    def n_components(self) -> int:
        """N."""
        return self.means.size(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of value: (..., D) -> (...), in nats, per unit of the state space.

        `value` has the batch shape and D, with any sample shape in front; where sizes are 1, either is broadcast to the other.
        Cost: N kernels a value, by `mdps.ops.mixture_log_prob`. For many values of each batch element see `log_prob_many`.

        Raises:
            TypeError: a value that is no tensor. ValueError: one whose last size is not D, or that does not fit the batch.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"value: expected a tensor, got {type(value).__name__}")
        if value.dim() == 0 or value.size(-1) != self.space.size:
            raise ValueError(f"value: expected shape (..., D) with D = {self.space.size}, got {tuple(value.shape)}")
        if self._validate_args:
            self._validate_sample(value)
        batch = self.batch_shape
        try:
            value = value.expand(torch.broadcast_shapes(value.shape, batch + self.event_shape))
        except RuntimeError:
            expected = f"a shape that broadcasts with {tuple(batch + self.event_shape)}, the batch's and D"
            raise ValueError(f"value: expected {expected}, got {tuple(value.shape)}") from None
        if (wider := value.shape[value.dim() - len(batch) - 1 : -1]) != batch:
            return self.expand(wider).log_prob(value)
        lead = value.shape[: value.dim() - len(batch) - 1]
        x = value.reshape(lead.numel(), *batch, value.size(-1)).movedim(0, -2)
        return self.log_prob_many(x).movedim(-1, 0).reshape(lead + batch)

    def log_prob_many(self, x: Tensor) -> Tensor:
        """Return the log-densities of M queries for each batch element: x (..., M, D) -> (..., M), one operator call."""
        return ops.mixture_log_prob(x, self.means, self.log_weights, self.bandwidths, n_angular=self.space.n_angular)

    def sample(
        self, sample_shape: Sequence[int] = (), *, seed: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return independent draws, sample_shape + (..., D), without gradient, the angles in [-pi, pi).

        Args:
            seed: int64 tensor (), reproduces the draws on every device; None: `mdps.ops.make_seed(generator)`.
        """
        shape = torch.Size(sample_shape)
        if seed is None:
            seed = ops.make_seed(generator, device=self.means.device)
        mixture, n_angular = (self.means, self.log_weights, self.bandwidths), self.space.n_angular
        draws, _ = ops.mixture_resample(*mixture, seed, shape.numel(), n_angular=n_angular, scheme="multinomial")
        return draws.movedim(-2, 0).reshape(shape + self.batch_shape + self.event_shape)

    def modes(self, k: int, radii: float | Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the k highest modes, (..., k, D) by falling density, angles in [-pi, pi), and log-densities there, (..., k).

        Two modes that differ by less than the radius in every dimension are one, the higher: (5, 5, radians(30)) for poses
        in metres is the paper's choice for localization. Where there are fewer than k, the rest repeat the highest, with
        log-density -inf. No gradient.

        Args:
            k: at least 1.
            radii: D numbers, or one for all dimensions, at least 0, in the units of the state (radians).

        Raises:
            ValueError: k or radii out of range. Cost and exact definition: `mdps.ops.find_modes`.
        """
        mixture = self.means, self.log_weights, self.bandwidths
        return ops.find_modes(*mixture, k, radii, n_angular=self.space.n_angular)

    @property
    def mean(self) -> Tensor:
        """(..., D); of an angle the circular mean, in [-pi, pi]."""
        return self.space.mean(self.means, self.log_weights)

    @property
    def variance(self) -> Tensor:
        """(..., D); of a linear dimension in squared units, of an angle the circular variance 1 - |E exp(i angle)|, 0 to 1."""
        g = len(self.space.linear)
        weights = self.log_weights.exp().unsqueeze(-1)
        linear, width = self.means[..., :g], self.bandwidths[..., :g]
        centre = (weights * linear).sum(-2)
        variance = (weights * (linear - centre.unsqueeze(-2)) ** 2).sum(-2) + width**2
        if not self.space.angular:
            return variance
        angles, concentration = self.means[..., g:], self.bandwidths[..., g:] ** -2
        length = torch.hypot((weights * angles.sin()).sum(-2), (weights * angles.cos()).sum(-2))
        kernel = torch.special.i1e(concentration) / torch.special.i0e(concentration)
        return torch.cat([variance, (1 - length * kernel).clamp(min=0)], -1)

    def marginal(self, names: str | Iterable[str]) -> "Mixture":
        """Return the mixture over the named dimensions alone, in the order that they have in the space."""
        space = self.space.subspace(names)
        index = self.space.index(space.names)
        # Not means[..., index], which makes a GPU wait for the copy of the index.
        means, bandwidths = (torch.stack([x[..., i] for i in index], -1) for x in (self.means, self.bandwidths))
        return Mixture(means, self.log_weights, bandwidths, space, self._validate_args)

    def __repr__(self) -> str:
        batch = tuple(self.batch_shape)
        return f"Mixture(batch_shape={batch}, n_components={self.n_components}, names={self.space.names})"

    def expand(self, batch_shape: Sequence[int], _instance: None = None) -> "Mixture":
        """Return this mixture with a larger batch shape, to which its own is broadcast."""
        batch = torch.Size(batch_shape)
        shared = self.bandwidths.dim() == 1
        return Mixture(
            self.means.expand(batch + self.means.shape[-2:]),
            self.log_weights.expand(batch + self.log_weights.shape[-1:]),
            self.bandwidths if shared else self.bandwidths.expand(batch + self.event_shape),
            self.space,
            self._validate_args,
        )


class Bandwidth(nn.Module):
    """A learned bandwidth for each dimension of the state: exp(parameter) + minimum, so it never comes near 0.

    Args:
        initial: D numbers, or one for all dimensions: what it is before training, in the units of the state (an angle's is
            b radians for a von Mises kernel of concentration b**-2).
        minimum: D numbers, or one: what it stays above. At least 0.
        space: gives D.
        name: what errors call it.

    Raises:
        ValueError: not D numbers, or initial <= minimum somewhere, or minimum < 0.
    """

    minimum: Tensor

    def __init__(
        self,
        initial: float | Sequence[float],
        minimum: float | Sequence[float],
        space: StateSpace,
        *,
        name: str = "bandwidth",
    ) -> None:
        super().__init__()
        first, least = _per_dimension(name, initial, space), _per_dimension("minimum_bandwidth", minimum, space)
        if not ((least >= 0) & (first > least)).all():
            raise ValueError(f"{name}: expected more than the minimum {least.tolist()} (at least 0), got {first.tolist()}")
        self.log_excess = nn.Parameter((first - least).log().to(torch.get_default_dtype()))
        self.register_buffer("minimum", least.to(torch.get_default_dtype()))

    def forward(self) -> Tensor:
        """Return the bandwidths, (D)."""
        return self.log_excess.exp() + self.minimum


def _per_dimension(name: str, value: float | Sequence[float], space: StateSpace) -> Tensor:
    numbers = torch.as_tensor(value, dtype=torch.float64)
    if numbers.shape not in ((), (space.size,)):
        raise ValueError(f"{name}: expected one number or {space.size}, for {space.names}, got {value}")
    return numbers.expand(space.size)
