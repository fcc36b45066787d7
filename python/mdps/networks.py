"""Small networks over particles: those of the bearings-only task, and the block that they are made of.

They fulfil the protocols of `mdps.filters` and `mdps.smoothers`. Each is an ordinary nn.Module whose layers are ordinary
nn.Linear, and runs through `ops.small_network`, or through `ops.move_poses` and `ops.weigh_poses`, which also do what stands
around the layers. These take all parameters as one flat tensor. It costs more to make than the network to run, so it is made
once a sequence: `for_sequence()` returns the module's forward function with the flat tensor in it, filters and smoothers use
that where a model has it, and nothing is kept on the module that could grow stale.

Source: the paper's appendix, "Bearings Only Tracking Task", and the figures of its network architectures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .ops._layers import changed
from .sequences import for_sequence

MINIMUM_WEIGHT = 1e-5
"""Weights lie in [1e-5, 1], so that no network can kill a particle for good."""
MINIMUM_LOG_DENSITY = -20.0
"""Log-densities that a smoother's network sees are cut here: far from all particles they would be as low as -1e6."""


class ParticleNetwork(nn.Module):
    """A multilayer perceptron, the same for every particle, whose second part takes further inputs.

    y = second(concatenate(first(x), extra, condition)): `extra` belongs to a particle, `condition` to a sequence. ReLU follows
    each layer but the last of `second`, which a sigmoid follows, and the last of `first` where `first_ends_in_relu`.

    Args:
        n_inputs: C, entries of x.
        first: widths of the layers of the first part, at least one.
        second: widths of the layers of the second part, at least one; the last is the number of outputs.
        n_extra: E, entries of `extra`; 0 for none.
        n_condition: K, entries of `condition`; 0 for none.

    Raises:
        ValueError: a layer that is wider than 256.

    Cost: one operator call; forward and backward O(B N P), P parameters, and no memory beside inputs and outputs.
    """

    def __init__(
        self,
        n_inputs: int,
        first: Sequence[int],
        second: Sequence[int],
        *,
        n_extra: int = 0,
        n_condition: int = 0,
        first_ends_in_relu: bool = True,
    ) -> None:
        super().__init__()
        self.first = _perceptron(n_inputs, first, nn.ReLU() if first_ends_in_relu else None)
        self.second = _perceptron(first[-1] + n_extra + n_condition, second, nn.Sigmoid())
        layers = ops.layers_of(self.first), ops.layers_of(self.second, extra=n_extra > 0, condition=n_condition > 0)
        if layers[0] is None or layers[1] is None:
            raise ValueError(f"expected widths of at most 256, got {(*first, *second)}")
        self.layers, self._kinds = layers[0] + layers[1], [type(m) for part in (self.first, self.second) for m in part]

    def flat_weights(self) -> Tensor:
        """All parameters as one differentiable tensor (P): make it once a sequence, it costs more than a `forward`.

        Raises:
            ValueError: layers that were exchanged for others, or that have hooks, pruning or a parametrization: the operator
                would not know.
        """
        weights = ops.flatten_parameters(self.first, self.second)
        kinds = [type(m) for part in (self.first, self.second) for m in part]
        if kinds != self._kinds:
            before, now = ([kind.__name__ for kind in x] for x in (self._kinds, kinds))
            raise ValueError(f"network: expected the layers that it was made with, {before}, got {now}")
        return weights

    def like(self, other: "ParticleNetwork") -> bool:
        """Return whether both have the same layers, so that their weights can be stacked."""
        return self.layers == other.layers

    def forward(self, x: Tensor, weights: Tensor, *, extra: Tensor | None = None, condition: Tensor | None = None) -> Tensor:
        """x (B, N, C), weights (P) or (R, P) of `flat_weights`, extra (B, N, E), condition (B, K) -> (B, N, outputs)

        The outputs lie in [0, 1]. Of R stacked sets the first serves the first B / R rows, and so on.
        """
        return ops.small_network(x, weights, self.layers, extra=extra, condition=condition)


class ObservationEncoder(nn.Module):
    """Codes bearings: (...) radians -> (..., width), by three layers with ReLU on (sin, cos)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = _perceptron(2, (width,) * 3, nn.ReLU())
        layers = ops.layers_of(self.layers)
        if layers is None:
            raise ValueError(f"width: expected at most 256, got {width}")
        self._layers = layers

    def forward(self, observations: Tensor) -> Tensor:
        directions = torch.stack([observations.sin(), observations.cos()], -1)
        codes = ops.small_network(directions.reshape(1, -1, 2), ops.flatten_parameters(self.layers), self._layers)
        return codes.reshape(*observations.shape, codes.size(-1))


class PoseModel(nn.Module):
    """What the models of poses share: their network's parameters are gathered once for a sequence, or for several models.

    Their operators know of a network only its parameters: one with hooks, pruning, a parametrization or another `forward` is
    refused with a ValueError. Hooks of the model itself, and the `forward` of a subclass, work: filters and smoothers then call
    the model for each step.
    """

    network: ParticleNetwork

    def for_sequence(self) -> Callable[..., Tensor]:
        """Return `forward` with the parameters gathered, for all the steps of one sequence."""
        return self._with_weights(self._weights())

    def _weights(self) -> Tensor:
        """The network's parameters, (P)."""
        if changed(self.network) or type(self.network).forward is not ParticleNetwork.forward:
            expected = "one without hooks or a forward of its own, which would be ignored (the model itself may have them)"
            raise ValueError(f"network: expected {expected}, got {type(self.network).__name__}")
        return self.network.flat_weights()

    @staticmethod
    def stack(models: "Sequence[PoseModel]") -> Callable[..., Tensor] | None:
        """Return one function for several models of a class, or None where more than their parameters differs."""
        first = models[0]
        if not all(m._like(first) for m in models):
            return None
        return first._with_weights(torch.stack([m._weights() for m in models]))

    def _with_weights(self, weights: Tensor) -> Callable[..., Tensor]:
        """`forward` with these parameters, (P) or (R, P)."""
        raise NotImplementedError

    def _like(self, other: Any) -> bool:
        return self.network.like(other.network)


class ResidualDynamics(PoseModel):
    """Moves poses (x, y, heading) by a learned, bounded random residual that depends on the heading alone.

    (x, y, sin, cos) + scale * (2 network(sin, cos, noise) - 1), then heading = atan2. Not seeing the position makes the motion
    the same everywhere.

    Args:
        scale: the largest change of x, y (units of the state), sin and cos in one step.
        noise_size: entries of noise a particle.
        width: width of the layers.
    """

    scale: Tensor
    wraps_angles = True

    def __init__(self, scale: Sequence[float] = (5.0, 5.0, 2.0, 2.0), noise_size: int = 4, width: int = 8) -> None:
        super().__init__()
        if len(scale) != 4:
            raise ValueError(f"scale: expected 4 numbers, of x, y, sine and cosine, got {len(scale)}")
        self.noise_size, self._scale = noise_size, tuple(map(float, scale))
        self.network = ParticleNetwork(2, (width,) * 4, (width,) * 3 + (4,), n_extra=noise_size, first_ends_in_relu=False)
        last = self.network.second[-2]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():  # begin near standing still: at torch's own size particles would leave the arena at once
            last.weight.mul_(0.1)
            last.bias.zero_()
        self.register_buffer("scale", torch.tensor(self._scale), persistent=False)

    def _like(self, other: Any) -> bool:
        return super()._like(other) and self._scale == other._scale

    def _with_weights(self, weights: Tensor) -> "PoseMove":
        return PoseMove(weights, self.network.layers, self.scale)

    def forward(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, 3), noise (B, N, K) from N(0, 1) -> (B, N, 3); heading in [-pi, pi). `action` is not used."""
        return self.for_sequence()(particles, noise, action)


class PoseLikelihood(PoseModel):
    """The measurement model of a filter: how well each pose (x, y, heading) explains an observation.

    log of a weight in [1e-5, 1], by three layers on (x, y, sin, cos) and three more that also see the observation's code.

    Args:
        encoder: codes observations (B, T, ...) as (B, T, width); it may be shared with other models.
        width: width of the layers and of the code.
    """

    def __init__(self, encoder: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.encoder = encoder
        self.network = ParticleNetwork(4, (width,) * 3, (width,) * 2 + (1,), n_condition=width)

    def encode(self, observations: Tensor) -> Tensor:
        """Code all observations of a batch at once: (B, T, ...) -> (B, T, width)."""
        return self.encoder(observations)

    def _with_weights(self, weights: Tensor) -> Callable[..., Tensor]:
        return PoseWeigh(weights, self.network.layers)

    def forward(self, particles: Tensor, code: Tensor) -> Tensor:
        """particles (B, N, 3), code (B, width) of `encode` -> log-likelihoods (B, N), in [log 1e-5, 0]."""
        return self.for_sequence()(particles, code)


class PoseSmootherLikelihood(PoseModel):
    """The measurement model of a smoother: it also sees what the forward and the backward filter say.

    As `PoseLikelihood`, with four layers in either part; the second also sees log m_f and log m_b of each particle, not below
    `MINIMUM_LOG_DENSITY` (a deviation from the paper, which does not cut them).

    Args:
        encoder: codes observations (B, T, ...) as (B, T, width); it may be shared with other models.
        width: width of the layers and of the code.
    """

    def __init__(self, encoder: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.encoder = encoder
        self.network = ParticleNetwork(4, (width,) * 4, (width,) * 3 + (1,), n_extra=2, n_condition=width)

    def encode(self, observations: Tensor) -> Tensor:
        """Code all observations of a batch at once: (B, T, ...) -> (B, T, width)."""
        return self.encoder(observations)

    def forward(self, particles: Tensor, code: Tensor, log_forward: Tensor, log_backward: Tensor) -> Tensor:
        """particles (B, M, 3), code (B, width), log-densities (B, M) -> log-likelihoods (B, M), in [log 1e-5, 0]."""
        return self.for_sequence()(particles, code, log_forward, log_backward)

    def _with_weights(self, weights: Tensor) -> Callable[..., Tensor]:
        layers, bounds = self.network.layers, {"minimum": MINIMUM_WEIGHT, "least_extra": MINIMUM_LOG_DENSITY}

        def weigh(particles: Tensor, code: Tensor, log_forward: Tensor, log_backward: Tensor) -> Tensor:
            densities = torch.stack([log_forward, log_backward], -1)
            return ops.weigh_poses(particles, weights, layers, extra=densities, condition=code, **bounds)

        return weigh


@dataclass(frozen=True)
class PoseMove:
    """What moves poses in the steps of one sequence: `ops.move_poses` with gathered parameters, (P) or (R, P)."""

    weights: Tensor
    layers: tuple[ops.Layer, ...]
    scale: Tensor

    def __call__(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        return ops.move_poses(particles, noise, self.weights, self.layers, self.scale)


@dataclass(frozen=True)
class PoseWeigh:
    """What weighs poses in the steps of one sequence: `ops.weigh_poses` with gathered parameters, (P) or (R, P)."""

    weights: Tensor
    layers: tuple[ops.Layer, ...]
    minimum: float = MINIMUM_WEIGHT

    def __call__(self, particles: Tensor, code: Tensor) -> Tensor:
        return ops.weigh_poses(particles, self.weights, self.layers, condition=code, minimum=self.minimum)


def _perceptron(n_inputs: int, widths: Sequence[int], last: nn.Module | None) -> nn.Sequential:
    modules: list[nn.Module] = []
    for i, width in enumerate(widths):
        modules += [nn.Linear(n_inputs if i == 0 else widths[i - 1], width), nn.ReLU()]
    return nn.Sequential(*modules[:-1], *([] if last is None else [last]))


class ResidualMean(nn.Module):
    """`ResidualDynamics` without noise: where a pose (x, y, heading) is expected to be at the next time.

    The network of a transition whose density can be evaluated, `mdps.KernelDynamics(ResidualMean(), bandwidths, space)`; the
    paper's FFBS has it with the bandwidths (1, 1, 1.25). Train it by `mdps.transition_loss`.

    Args:
        scale: the largest change of x, y (units of the state), sin and cos in one step.
        width: width of the layers.
    """

    def __init__(self, scale: Sequence[float] = (5.0, 5.0, 2.0, 2.0), width: int = 8) -> None:
        super().__init__()
        self.residual = ResidualDynamics(scale, noise_size=0, width=width)

    def for_sequence(self) -> Callable[..., Tensor]:
        """Return `forward` with the parameters gathered, for all the steps of one sequence."""
        move = for_sequence([self.residual])

        def mean(particles: Tensor, action: Tensor | None = None) -> Tensor:
            return move(particles, None, action)

        return mean

    def forward(self, particles: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, 3) -> (B, N, 3); heading in [-pi, pi]. `action` is not used."""
        return self.for_sequence()(particles, action)
