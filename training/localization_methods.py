"""The methods that the localization experiment compares, by name: models, where they start, stages of training, estimates.

A stage before the paper's, "single views", lets encoders learn from single images which poses fit them, by scores of the true
pose and of others: small networks then localize after minutes, where the filters' losses alone, from particles 50 m off, take
hours to begin. The paper's setting leaves it out. The method "encoders" has that stage alone; smoother and dense search can
start from its run.

Source: the paper, "City Scale Global Localization Task", and its appendix, "MDPS Training Procedure Details".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from configuration import ConfigurationError
from localization_base import (
    WHOLE,
    Belief,
    Localization,
    map_of_each_frame,
    mean_of_observed,
    odometry_noise,
    of_rows,
    row_keys,
    side,
    start,
    view_loss,
)
from staged import Stage
from torch import Tensor, nn

from mdps import ForwardFilterBackwardSmoother, KernelDynamics, Mixture, TruncatedGradientParticleFilter, ops
from mdps.datasets import kitti
from mdps.localization import (
    FULL,
    SMALL,
    SPACE,
    Batch,
    BirdsEyeView,
    Encoders,
    MapEncoder,
    MapFeatures,
    MapSmoother,
    OdometryDynamics,
    Scene,
    anywhere,
    around,
    make_scene,
    seeing,
)
from mdps.localization.dense_search import DenseSearch
from mdps.localization.errors import Estimates, estimates_of
from mdps.localization.image_encoder import ImageEncoder
from mdps.localization.map_smoother import POSTERIOR_BANDWIDTH
from mdps.localization.retrieval import GaussianDynamics, Retrieval, RetrievalLikelihood
from mdps.localization.windows import crop, search_near, search_sliding_window, search_true_window

SIZES = {"full": FULL, "small": SMALL}
GAUSSIAN_NOISE = (2.5, 2.5, math.radians(15))
"""Of dynamics that are not learned, metres and radians: the paper's, "Retrieval (PF)"."""
FIRST_TEMPERATURE = 5.0
"""Of dense search, before training."""


@dataclass(frozen=True)
class Method:
    """One method: its model and the stages of its training."""

    build: type[Localization]
    stages: Callable[[Any], list[Stage]]
    learns_from_views: bool = False
    """Whether it can begin with the stage "single views"."""


class SmootherExperiment(Localization):
    """MDPS, and in it the forward and the backward MDPF; to compare, FFBS with the forward filter's likelihood.

    FFBS needs a density of the dynamics: odometry with Gaussian and von Mises noise, as wide as that of Retrieval (PF).
    """

    outputs: ClassVar = {
        "forward": Belief("MDPF", "mdpf", ("forward",)),
        "backward": Belief("MDPF-Backward", "mdpf-backward", ("backward",)),
        "smoothed": Belief("MDPS", "mdps", ("forward", "backward")),
        "classical": Belief("FFBS", "ffbs", ("forward",), is_trained=False),
    }

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c = c
        noise = odometry_noise(c)
        position, turn = max(noise.metres * (2 / 3) ** 0.5, 0.1), max(math.radians(noise.degrees) / 3**0.5, 0.01)
        dynamics = [OdometryDynamics((position, position, turn), reverse=reverse) for reverse in (False, True)]
        self.model = MapSmoother(Encoders(SIZES[c.networks], pretrained=c.pretrained), c.n_particles, dynamics)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        s = self.model.smoother
        filters = s.forward_filter, s.backward_filter
        return {
            "encoders": list(self.model.encoders.parameters()),
            "filters": [p for f in filters for p in f.dynamics.parameters()],
            "temperatures": [f.likelihood.log_temperature for f in filters],
            "resampling": [p for f in filters for p in f.resampling_bandwidth.parameters()],
            "posterior": [p for f in filters for p in f.posterior_bandwidth.parameters()],
            "smoother": list(s.likelihood.parameters()),
            "output": list(s.posterior_bandwidth.parameters()),
        }

    def beliefs(
        self, batch: Batch, seed: int, smoothed: bool = True, rows: slice = WHOLE, scene: Scene | None = None
    ) -> dict[str, Mixture]:
        """Beliefs of batch shape (B, T) from starts around the truth; the smoothed ones where they are asked for.

        rows: those that are computed, with the random numbers that they have in the whole batch; scene: what they see, where
        it is known already.
        """
        c, keys = self.c, ops.split_seed(torch.tensor(seed, device=batch.poses.device), 3)
        some, (_, end, run) = of_rows(batch, rows), (row_keys(key, batch, rows) for key in keys)
        scene = self._observe(some) if scene is None else scene
        initial = start(batch, c, keys[0], rows)
        if c.backward_start == "true":
            final = around(some.poses[:, -1], c.n_last, c.first_metres, 1.0, end)
        else:
            final = anywhere(len(some.poses), c.n_last, (side(batch), side(batch)), end)
        filters = self.model.smoother.forward_filter, self.model.smoother.backward_filter
        learns = any(p.requires_grad for f in filters for p in f.parameters()) or scene.map.features.requires_grad
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            pair = self.model.filter(scene, initial, final, some.actions, some.observed, run)
        found = {"forward": pair[0].posterior, "backward": pair[1].posterior}
        return found | {"smoothed": self.model.smooth(scene, *pair, some.observed, run).smoothed} if smoothed else found

    def classical(self, batch: Batch, seed: int, scene: Scene) -> Mixture:
        """The belief of FFBS, batch shape (B, T), from the start that the forward filter has."""
        c, keys = self.c, ops.split_seed(torch.tensor(seed, device=batch.poses.device), 4)
        forward = self.model.smoother.forward_filter
        likelihood, dynamics = forward.likelihood, KernelDynamics(_Odometry(), GAUSSIAN_NOISE, SPACE)
        bandwidths = forward.posterior_bandwidth().tolist()
        options = {"posterior_bandwidth": bandwidths, "minimum_bandwidth": 0.0}
        filter_ = TruncatedGradientParticleFilter(SPACE, dynamics, likelihood, c.n_particles, **options)
        smoother = ForwardFilterBackwardSmoother(filter_, dynamics, **options).to(batch.poses.device)
        with seeing(scene, likelihood):
            initial = start(batch, c, keys[0])
            return smoother(scene.codes(), initial, batch.actions, observed=batch.observed, seed=keys[3]).smoothed

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int, rows: slice = WHOLE) -> dict[str, Tensor]:
        if names == ("view",):
            filters = self.model.smoother.forward_filter, self.model.smoother.backward_filter
            log_temperatures = torch.stack([f.likelihood.log_temperature for f in filters])
            scene = self._observe(of_rows(batch, rows))
            return {"view": view_loss(scene, batch, log_temperatures, self.c.n_others, seed, rows)}
        beliefs = self.beliefs(batch, seed, "smoothed" in names, rows)
        return {name: -beliefs[name].log_prob(batch.poses[rows]).mean() for name in names}

    def _observe(self, batch: Batch) -> Scene:
        """Without a graph where the encoders do not learn: it would take the most memory of all. Their BatchNorm stays, too."""
        learns = any(p.requires_grad for p in self.model.encoders.parameters())
        self.model.encoders.train(self.training and learns)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            seen = batch.images, batch.camera, batch.classes, batch.pixels_per_metre
            return self.model.observe(*seen, mounts=batch.mounts, chunk=self.c.chunk or None)

    def estimates(self, batch: Batch, seed: int, names: Sequence[str] | None = None) -> dict[str, Estimates]:
        names, scene = names or tuple(self.outputs), self._observe(batch)
        beliefs = self.beliefs(batch, seed, "smoothed" in names, scene=scene)
        if "classical" in names:
            beliefs["classical"] = self.classical(batch, seed, scene)
        return {name: estimates_of(beliefs[name], batch.poses) for name in names}


class EncodersExperiment(Localization):
    """Encoders by themselves, which learn from single images; they have no estimates."""

    outputs: ClassVar = {}

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c = c
        self.encoders = Encoders(SIZES[c.networks], pretrained=c.pretrained)
        self.search = DenseSearch(self.encoders.sizes.grid, c.n_rotations)
        with torch.no_grad():
            self.search.log_temperature.fill_(math.log(FIRST_TEMPERATURE))

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"encoders": list(self.encoders.parameters()), "temperatures": list(self.search.parameters())}

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int, rows: slice = WHOLE) -> dict[str, Tensor]:
        scene = make_scene(*self._encode(of_rows(batch, rows)), self.search.grid)
        return {"view": view_loss(scene, batch, self.search.log_temperature, self.c.n_others, seed, rows)}

    def _encode(self, batch: Batch) -> tuple[MapFeatures, BirdsEyeView]:
        views = self.encoders.encode_images(batch.images, batch.camera, chunk=self.c.chunk or None)
        return self.encoders.encode_map(batch.classes, batch.pixels_per_metre), views


class SearchExperiment(EncodersExperiment):
    """Dense search with encoders of its own: each frame by itself, in windows that `_in_windows` tells."""

    outputs: ClassVar = {
        "sliding": Belief("Dense search", "dense-search", ("sliding",)),
        "true window": Belief("Dense search, window at the truth", "dense-search-cheat", ("true window",)),
        "near": Belief("Dense search, near KITTI's guess", "dense-search-near", ("near",)),
    }

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int, rows: slice = WHOLE) -> dict[str, Tensor]:
        if names == ("view",):
            return super().losses(batch, names, seed, rows)
        some = of_rows(batch, rows)
        map, views = self._encode(some)
        n, random = batch.observed.numel(), torch.tensor(seed, device=batch.poses.device)
        off = (ops.philox_uniform(random, (n, 2)).view(*batch.observed.shape, 2)[rows] - 0.5) * 0.75 * self.c.training_window
        window = crop(map, (some.poses[..., :2] + off).flatten(0, 1), self.c.training_window, map_of_each_frame(some))
        loss = self.search.loss(window, BirdsEyeView(*(x.flatten(0, 1) for x in views)), some.poses.flatten(0, 1))
        return {"window": mean_of_observed(loss.view_as(some.observed), batch, rows)}

    def estimates(self, batch: Batch, seed: int, names: Sequence[str] | None = None) -> dict[str, Estimates]:
        map, views = self._encode(batch)
        frames = [BirdsEyeView(*(x[:, t] for x in views)) for t in range(batch.poses.size(1))]
        self.search.n_rotations = self.c.n_test_rotations
        grid = self.search.grid
        reach = math.hypot(grid.depth, grid.width / 2) * grid.cell
        return _in_windows(self.search, map, frames, batch, self.c.window, reach)


class RetrievalExperiment(Localization):
    """Retrieval, by itself and as the likelihood of a particle filter that learns nothing else."""

    outputs: ClassVar = {
        "sliding": Belief("Retrieval", "retrieval", ("sliding",)),
        "true window": Belief("Retrieval, window at the truth", "retrieval-cheat", ("true window",)),
        "near": Belief("Retrieval, near KITTI's guess", "retrieval-near", ("near",)),
        "filter": Belief("Retrieval (PF)", "retrieval-pf", ("forward",), is_trained=False),
    }

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c, sizes = c, SIZES[c.networks]
        channels = 256 if c.networks == "full" else 32
        backbone = "resnet50" if c.networks == "full" else sizes.image_backbone
        images = ImageEncoder(replace(sizes, image_backbone=backbone, rays=False, scale_bins=1), pretrained=c.pretrained)
        self.retrieval = Retrieval(
            MapEncoder(replace(sizes, matching=channels)), _Trunk(images), channels, sizes.latent, c.n_test_rotations
        )

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"encoders": list(self.retrieval.parameters())}

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int, rows: slice = WHOLE) -> dict[str, Tensor]:
        some = of_rows(batch, rows)
        map, vectors = self._encode(some)
        window = crop(map, some.poses.flatten(0, 1), self.c.training_window, map_of_each_frame(some))
        loss = self.retrieval.loss(window, vectors.flatten(0, 1), some.poses.flatten(0, 1))
        return {"window": mean_of_observed(loss.view_as(some.observed), batch, rows)}

    def estimates(self, batch: Batch, seed: int, names: Sequence[str] | None = None) -> dict[str, Estimates]:
        c, (map, vectors) = self.c, self._encode(batch)
        keys = ops.split_seed(torch.tensor(seed, device=batch.poses.device), 2)
        filter_ = TruncatedGradientParticleFilter(
            SPACE,
            GaussianDynamics(GAUSSIAN_NOISE),
            RetrievalLikelihood(map),
            c.n_particles,
            posterior_bandwidth=POSTERIOR_BANDWIDTH,
        ).to(batch.poses.device)
        initial = start(batch, c, keys[0])
        belief = filter_(vectors, initial, batch.actions, observed=batch.observed, seed=keys[1]).posterior
        found = _in_windows(self.retrieval, map, list(vectors.unbind(1)), batch, c.window, 0.0)
        return found | {"filter": estimates_of(belief, batch.poses)}

    def _encode(self, batch: Batch) -> tuple[MapFeatures, Tensor]:
        codes = self.retrieval.encode_images(batch.images, chunk=self.c.chunk or None)
        return self.retrieval.encode_map(batch.classes, batch.pixels_per_metre), codes


class _Odometry(nn.Module):
    """Where odometry leads: the mean of a transition."""

    def forward(self, particles: Tensor, action: Tensor) -> Tensor:
        return particles + action.unsqueeze(1)


class _Trunk(nn.Module):
    """The image encoder's features alone."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        encoder.scales = nn.Identity()  # no depth is asked for, and what is not used would not learn

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images, images.new_zeros(len(images), 4))[0]


def _in_windows(
    searcher: Any, map: MapFeatures, views: Sequence[Any], batch: Batch, size: float, reach: float
) -> dict[str, Estimates]:
    """Estimates in windows that begin at the truth, or at the data's first guess, and slide with the odometry; in windows
    around the truth; and near the data's guess of each frame, as far as it may be off: KITTI's task of single images.

    reach: metres that views cover."""
    seen = {"searcher": searcher, "map": map, "views": views, "observed": batch.observed}
    guesses = batch.poses if batch.errors is None else SPACE.wrap(batch.poses + batch.errors)
    found = {
        "sliding": search_sliding_window(**seen, start=guesses[:, 0], actions=batch.actions, size=size),
        "true window": search_true_window(**seen, truth=batch.poses, size=size),
    }
    if batch.errors is not None:
        turn = max(math.radians(kitti.GUESS_DEGREES), math.pi / searcher.n_rotations)
        found["near"] = search_near(**seen, guesses=guesses, metres=2**0.5 * kitti.GUESS_METRES, turn=turn, margin=reach)
    counted = torch.ones_like(batch.observed)
    return {name: Estimates(x.poses, x.log_probs, batch.poses, counted, None) for name, x in found.items()}


# ---- Stages -------------------------------------------------------------------------------------------------------------


def _smoother_stages(c: Any) -> list[Stage]:
    """The paper's four stages for MGL, or five for KITTI."""
    both, smoothed = {"forward": 0.5, "backward": 0.5}, {"smoothed": 1.0}
    filters = {"filters": 1e-3, "temperatures": 1e-2, "resampling": 1e-5}
    encoders = Stage("filters and encoders", filters | {"encoders": 1e-3}, both, c.first_stage_epochs)
    bandwidths = Stage("posterior bandwidths", {"posterior": 1e-2}, both)
    smoother = Stage("smoother", {"smoother": 1e-3, "output": 1e-2}, smoothed)
    if c.layout == "kitti":
        output = Stage("the smoother's bandwidth", {"output": 1e-3}, smoothed)
        return [encoders, Stage("filters", filters, both), bandwidths, smoother, output]
    rates = {"filters": 1e-4, "temperatures": 1e-4, "resampling": 1e-5, "posterior": 1e-4, "smoother": 1e-4, "output": 1e-4}
    return [encoders, bandwidths, smoother, Stage("everything but the encoders", rates, smoothed)]


def _search_stages(c: Any) -> list[Stage]:
    return [Stage("window", {"encoders": 1e-3, "temperatures": 1e-3}, {"window": 1.0}, c.first_stage_epochs)]


def _retrieval_stages(c: Any) -> list[Stage]:
    return [Stage("window", {"encoders": 1e-3 if c.networks == "small" else 1e-5}, {"window": 1.0}, c.first_stage_epochs)]


METHODS: dict[str, Method] = {
    "mdps": Method(SmootherExperiment, _smoother_stages, learns_from_views=True),
    "dense-search": Method(SearchExperiment, _search_stages, learns_from_views=True),
    "encoders": Method(EncodersExperiment, lambda c: [], learns_from_views=True),
    "retrieval": Method(RetrievalExperiment, _retrieval_stages),
}


def start_from_encoders(model: Localization, state: dict[str, Tensor]) -> None:
    """Give a smoother or dense search the encoders and the temperature of the state_dict of a run of "encoders"."""
    encoders = model.model.encoders if isinstance(model, SmootherExperiment) else model.encoders
    encoders.load_state_dict({k.removeprefix("encoders."): v for k, v in state.items() if k.startswith("encoders.")})
    for temperature in model.groups()["temperatures"]:
        temperature.data.fill_(state["search.log_temperature"])


def stages(c: Any) -> list[Stage]:
    """The stages of training of the configuration's method.

    Raises:
        ConfigurationError: there are none.
    """
    method = METHODS[c.method]
    each = method.stages(c)
    if c.view_epochs and method.learns_from_views:
        each.insert(0, Stage("single views", {"encoders": 2e-3, "temperatures": 1e-2}, {"view": 1.0}, c.view_epochs))
    if not each:
        raise ConfigurationError(f"view_epochs: expected at least 1 for the method {c.method}, got {c.view_epochs}")
    return [replace(s, rates={k: r * c.rate_factor for k, r in s.rates.items()}, final_rate=c.final_rate) for s in each]
