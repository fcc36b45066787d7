"""The models of filters and smoothers on a map: how poses move with odometry, and how well an image fits at a pose.

They fulfil the protocols of `mdps.filters` and `mdps.smoothers`. What a batch of sequences sees, its maps and views from above,
is a `Scene`. Filters hand a model the observation of each row: here that is the number of the view in the scene, counted
from 1, and 0 where there is none. So no view and no map is copied for a filter, a step or a particle.

Source: the paper's appendix, "MDPF/MDPS Model Architectures" of the global localization task.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..networks import ParticleNetwork
from ..sequences import whole_number
from . import inputs
from .geometry import BirdsEyeView, Grid, MapFeatures

MINIMUM_WEIGHT = 1e-8
"""Weights of the smoother's network lie in [1e-8, 1]. The paper has 1e-4: divided by q, the least weight of a lone particle, as
there are many where a filter starts anywhere, is then more than the truth has."""
MINIMUM_LOG_DENSITY = -20.0
"""Log-densities that the smoother's network sees are cut here."""
_FIRST_OFFSET = 10.0
"""Of the smoother's logits: about what the log-densities add up to, at the truth, in nats per m^2 rad, is taken back."""
NEAR = (1.5, 1.5, 0.1)
"""Metres and radians: what filters resample with, at first."""
_ACTION_SCALE = (5.0, 5.0, 0.25)
"""Metres and radians that are one unit for the network that moves poses."""


class Scene(NamedTuple):
    """What a batch of sequences sees: B maps, and T views on each of them, each of one camera or of V cameras."""

    map: MapFeatures
    views: BirdsEyeView
    """Of (B, T, ...), or (B, T, V, ...) with mounts; the features are multiplied with the confidence already."""
    grid: Grid
    mounts: Tensor | None = None
    """(V, 3): where each camera sits on the vehicle, metres ahead and to the left, and radians to the left that it looks."""

    def codes(self) -> Tensor:
        """The observations to hand to a filter: the number of each view, int64 (B, T), counted from 1."""
        B, T = self.views.valid.shape[:2]
        return torch.arange(1, B * T + 1, device=self.views.valid.device).view(B, T)

    def scores(self, poses: Tensor, codes: Tensor) -> Tensor:
        """How well views fit at poses (R, N, 3): views `codes` (R) on their maps -> (R, N); 0 where the code is 0.

        Scores of several cameras add up; one that sees nothing (`valid` is False everywhere) adds 0.
        """
        entry, n_lead, n_cameras = (codes - 1).clamp(min=0), 2, 1
        place = entry // self.views.valid.size(1)
        if self.mounts is not None:
            n_lead, n_cameras = 3, len(self.mounts)
            cameras = torch.arange(n_cameras, device=codes.device)
            entry, place = (entry.unsqueeze(1) * n_cameras + cameras).flatten(), place.repeat_interleave(n_cameras)
            poses = mounted(poses.unsqueeze(1), self.mounts.unsqueeze(1)).flatten(0, 1)
        at = self.map._replace(first=self.map.first.index_select(0, place))
        scores = ops.pose_correlation(
            self.map.features,
            self.views.features.flatten(0, n_lead - 1).index_select(0, entry),
            at.to_pixels(poses),
            self.views.valid.flatten(0, n_lead - 1).index_select(0, entry),
            origin=self.grid.origin,
            map_index=place,
            normalize="valid",
        )
        return torch.where((codes > 0).unsqueeze(-1), scores.unflatten(0, (-1, n_cameras)).sum(1), 0.0)


def mounted(poses: Tensor, mounts: Tensor) -> Tensor:
    """Poses of cameras: of vehicles (..., 3) and where cameras sit on them (..., 3), metres ahead, to the left, and a turn."""
    x, y, heading = poses.unbind(-1)
    ahead, left, turn = mounts.unbind(-1)
    cosine, sine = heading.cos(), heading.sin()
    return torch.stack([x + ahead * cosine - left * sine, y + ahead * sine + left * cosine, heading + turn], -1)


def pose_loss(
    scene: Scene, truth: Tensor, n: int, log_temperature: Tensor, side: float, seed: Tensor, *, first: int = 0
) -> Tensor:
    """-log of the share of a nearly true pose among n others, by temperature * score: what encoders learn from single images.

    It is as near to the truth as particles come, `NEAR` of it: a score that only the very truth has is of no use to a filter.
    Half of the others, rounded up, are anywhere on the map or up to 32 m beside it, the rest within 16 m of the truth, in any
    direction. Dense search's loss (`DenseSearch.loss`) compares with all poses of a grid, and takes some hundred times as long.

    Args:
        truth: (B, T, 3). n: at least 1.
        log_temperature: (), or (H) for as many losses, which are averaged.
        side: of the map in metres. seed: int64 ().
        first: number of the first sequence among all that share the seed: of those alone, the losses that they have there.

    Returns:
        (B, T), in nats: log(n + 1) if all are equally likely.

    Raises:
        TypeError: n, first or seed. ValueError: another argument, and which.
    """
    n, first, codes = whole_number("n", n, 1), whole_number("first", first, 0), scene.codes()
    B, T = codes.shape
    if truth.shape != (B, T, 3):
        raise ValueError(f"truth: expected shape {(B, T, 3)}, of a pose for each view of the scene, got {tuple(truth.shape)}")
    if log_temperature.dim() > 1:
        raise ValueError(f"log_temperature: expected shape () or (H,), got {tuple(log_temperature.shape)}")
    inputs.at_least(0, side=side)
    true, (near_seed, far_seed) = truth.reshape(B * T, 1, 3), ops.split_seed(seed, 2).unbind()
    before, rows = first * T, (first + B) * T
    near = true + truth.new_tensor(NEAR) * ops.philox_normal(near_seed, (rows, 1, 3), dtype=truth.dtype)[before:]
    apart = 2 * ops.philox_uniform(far_seed, (rows, n, 3), dtype=truth.dtype)[before:] - 1
    reach = truth.new_tensor([[side / 2 + 32, side / 2 + 32, math.pi], [16.0, 16.0, math.pi]])
    around = (torch.arange(n, device=truth.device) * 2 >= n).long()  # half 0, half 1
    others = apart * reach[around] + true * around.unsqueeze(-1)
    scores = scene.scores(torch.cat([near, others], 1), codes.flatten())
    logits = log_temperature.exp().view(-1, 1, 1) * scores
    return -logits.log_softmax(-1)[..., 0].mean(0).view(B, T)


def make_scene(map: MapFeatures, views: BirdsEyeView, grid: Grid, mounts: Tensor | None = None) -> Scene:
    """A scene of maps (B) and views (B, T, ...), or (B, T, V, ...) of V cameras with these mounts (V, 3).

    A view's features are weighed by its confidence here, once.

    Raises:
        ValueError: another number of maps than of sequences, other mounts than cameras, or cells that are not as large as the
            map's pixels.
    """
    B, cameras = map.features.size(0), () if mounts is None else (len(mounts),)
    shape = views.features.shape
    if len(shape) != 5 + len(cameras) or shape[0] != B or shape[2:-3] != cameras:
        letters = (
            "(B, T, C, depth, width)" if mounts is None else f"(B, T, V, C, depth, width) with V = {len(mounts)}, of mounts,"
        )
        raise ValueError(f"views: expected features of shape {letters} with B = {B}, that of the maps, got {tuple(shape)}")
    if abs(grid.cell * map.pixels_per_metre - 1) > 1e-6:
        raise ValueError(f"grid: expected cells of {1 / map.pixels_per_metre} m, pixels of the map, got {grid.cell} m")
    weighed = views.features * views.confidence.unsqueeze(-3)
    return Scene(map, BirdsEyeView(weighed, views.confidence, views.valid), grid, mounts)


class SceneModel(nn.Module):
    """A model that looks at the scene which `seeing` gives it for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.scene: Scene | None = None

    def seen(self, poses: Tensor, codes: Tensor) -> Tensor:
        """`Scene.scores` in the scene of now."""
        if self.scene is None:
            raise RuntimeError("there is no scene: call the filter within `with seeing(scene, model):`")
        return self.scene.scores(poses, codes)


@contextmanager
def seeing(scene: Scene, *models: SceneModel) -> Iterator[None]:
    """Let models look at this scene, and at none afterwards."""
    for model in models:
        model.scene = scene
    try:
        yield
    finally:
        for model in models:
            model.scene = None


class OdometryDynamics(nn.Module):
    """Moves poses by noisy odometry, a learned spread, and a learned, bounded residual (protocol `mdps.Dynamics`).

    pose + action + spread * noise + scale * (2 network(sin, cos, action, noise) - 1): the change of the heading is the
    residual's last number. The network does not see the position: the motion is the same everywhere (the paper lets it see it).

    Args:
        spread: first standard deviations of the noise that is added, metres, metres and radians: those of MGL's odometry.
        scale: the largest residual, in the same units.
        reverse: the actions are taken back: of a filter that runs from the end to the start.
        width: width of the layers.
    """

    noise_size = 4
    scale: Tensor
    unit: Tensor

    def __init__(
        self,
        spread: Sequence[float] = (4.0, 4.0, 0.15),
        scale: Sequence[float] = (8.0, 8.0, 0.5),
        *,
        reverse: bool = False,
        width: int = 32,
    ) -> None:
        super().__init__()
        self.reverse = reverse
        self.network = ParticleNetwork(2, (width,), (width, width, 3), n_extra=self.noise_size, n_condition=3)
        self.log_spread = nn.Parameter(torch.tensor(tuple(map(float, spread))).log())
        self.register_buffer("scale", torch.tensor(tuple(map(float, scale))), persistent=False)
        self.register_buffer("unit", torch.tensor(_ACTION_SCALE), persistent=False)
        last = self.network.second[-2]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():  # begin with odometry and spread alone
            last.weight.mul_(0.1)
            last.bias.zero_()

    def forward(self, particles: Tensor, noise: Tensor, action: Tensor | None = None) -> Tensor:
        """particles (B, N, 3), noise (B, N, 4), action (B, 3): East, North [m] and turn [rad], of the step -> (B, N, 3)."""
        if action is None:
            raise ValueError("action: expected odometry (B, 3), got None")
        heading = particles[..., 2]
        direction = torch.stack([heading.sin(), heading.cos()], -1)
        weights = self.network.flat_weights()
        residual = self.network(direction, weights, extra=noise, condition=action / self.unit)
        step = -action if self.reverse else action
        return particles + step.unsqueeze(1) + self.log_spread.exp() * noise[..., :3] + self.scale * (2 * residual - 1)


class MapLikelihood(SceneModel):
    """The measurement model of a filter (protocol `mdps.Likelihood`): log l(x) = temperature * score of the view at the pose.

    Args:
        temperature: before training.
    """

    def __init__(self, temperature: float = 5.0) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    def forward(self, particles: Tensor, codes: Tensor) -> Tensor:
        """particles (B, N, 3), codes (B) of `Scene.codes` -> log-likelihoods (B, N), up to a constant."""
        return self.log_temperature.exp() * self.seen(particles, codes)


class MapSmootherLikelihood(SceneModel):
    """The measurement model of the smoother (protocol `mdps.SmootherLikelihood`).

    log of a weight in [1e-8, 1], by a sigmoid on a weighted sum of (temperature * score, log m_f, log m_b) and on four layers
    with PReLU that see the same. The sum, which the paper has not, begins with weights of 1: with true models that would be
    the answer, and training has less far to go.

    Args:
        temperature: before training.
        width: width of the layers.
    """

    def __init__(self, temperature: float = 5.0, width: int = 64) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.sum = nn.Parameter(torch.ones(3))
        layers: list[nn.Module] = []
        for n in (3, width, width):
            layers += [nn.Linear(n, width), nn.PReLU()]
        last = nn.Linear(width, 1)
        self.network = nn.Sequential(*layers, last)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.fill_(_FIRST_OFFSET)

    def forward(self, particles: Tensor, codes: Tensor, log_forward: Tensor, log_backward: Tensor) -> Tensor:
        """particles (B, M, 3), codes (B) of `Scene.codes`, log m_f and log m_b (B, M) -> log-likelihoods (B, M)."""
        score = self.log_temperature.exp() * self.seen(particles, codes)
        densities = torch.stack([log_forward, log_backward], -1).clamp(min=MINIMUM_LOG_DENSITY)
        inputs = torch.cat([score.unsqueeze(-1), densities], -1)
        weight = torch.sigmoid(inputs @ self.sum + self.network(inputs / 5).squeeze(-1))
        return torch.log(MINIMUM_WEIGHT + (1 - MINIMUM_WEIGHT) * weight)
