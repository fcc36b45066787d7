"""The methods that the localization experiment compares, by name: models, where they start, stages of training, estimates.

Source: the paper, "City Scale Global Localization Task", and its appendix, "MDPS Training Procedure Details".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from staged import Stage
from torch import Tensor, nn

from mdps import Mixture, ops
from mdps.localization import FULL, SMALL, Batch, Encoders, MapSmoother, anywhere, around
from mdps.localization.errors import Estimates, estimates_of

SIZES = {"full": FULL, "small": SMALL}


@dataclass(frozen=True)
class Method:
    """One method: what it is called in figures, its model and the stages of its training."""

    title: str
    build: Callable[[Any], "Localization"]
    stages: Callable[[Any], list[Stage]]


class Localization(nn.Module):
    """What training and evaluation need of a method's model."""

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by what the stages call them; every parameter is in one group."""
        raise NotImplementedError

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
        """The named losses of a batch."""
        raise NotImplementedError

    def estimates(self, batch: Batch, seed: int) -> dict[str, Estimates]:
        """What the model says of a batch, by the name of each of its beliefs."""
        raise NotImplementedError

    def titles(self) -> dict[str, tuple[str, str]]:
        """Title and name, in figures, of each of its beliefs."""
        raise NotImplementedError

    @staticmethod
    def losses_together(
        models: "Sequence[Localization]",
        batches: Sequence[Batch],
        names: tuple[str, ...],
        seeds: Sequence[int],
        rows: slice = slice(None),
    ) -> list[dict[str, Tensor]]:
        """The losses of several models, each with its batch; of these rows of it."""
        return [m.losses(of_rows(b, rows), names, seed) for m, b, seed in zip(models, batches, seeds, strict=True)]


def of_rows(batch: Batch, rows: slice) -> Batch:
    """Some of the sequences of a batch."""
    return Batch(*(x[rows] if isinstance(x, Tensor) else x for x in batch))


class Smoother(Localization):
    """MDPS, and in it the forward and the backward MDPF."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c = c
        self.model = MapSmoother(Encoders(SIZES[c.networks], pretrained=c.pretrained), c.n_particles)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        s = self.model.smoother
        filters = s.forward_filter, s.backward_filter
        networks = [m for f in filters for m in (f.dynamics, f.likelihood)]
        return {
            "encoders": list(self.model.encoders.parameters()),
            "filters": [p for m in networks for p in m.parameters()],
            "resampling": [p for f in filters for p in f.resampling_bandwidth.parameters()],
            "posterior": [p for f in filters for p in f.posterior_bandwidth.parameters()],
            "smoother": list(s.likelihood.parameters()),
            "output": list(s.posterior_bandwidth.parameters()),
        }

    def beliefs(self, batch: Batch, seed: int, smoothed: bool = True) -> dict[str, Mixture]:
        """Beliefs of batch shape (B, T) from starts around the truth; the smoothed ones where they are asked for."""
        c, keys = self.c, ops.split_seed(torch.tensor(seed, device=batch.poses.device), 3)
        learns = any(p.requires_grad for p in self.model.encoders.parameters())
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            scene = self.model.observe(batch.images, batch.camera, batch.classes, batch.pixels_per_metre, chunk=c.chunk or None)
        initial = around(batch.poses[:, 0], c.n_first, c.first_metres, c.first_concentration, keys[0])
        if c.backward_start == "true":
            final = around(batch.poses[:, -1], c.n_last, c.first_metres, 1.0, keys[1])
        else:
            size = tuple(n / batch.pixels_per_metre for n in batch.classes.shape[:-3:-1])
            final = anywhere(len(batch.poses), c.n_last, size, keys[1])
        call = self.model if smoothed else self.model.filter
        result = call(scene, initial, final, batch.actions, batch.observed, keys[2])
        if smoothed:
            return {
                "forward": result.forward.posterior, "backward": result.backward.posterior, "smoothed": result.smoothed
            }  # fmt: skip
        return {"forward": result[0].posterior, "backward": result[1].posterior}

    def losses(self, batch: Batch, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
        beliefs = self.beliefs(batch, seed, "smoothed" in names)
        return {name: -beliefs[name].log_prob(batch.poses).mean() for name in names}

    def titles(self) -> dict[str, tuple[str, str]]:
        return {"forward": ("MDPF", "mdpf"), "backward": ("MDPF-Backward", "mdpf-backward"), "smoothed": ("MDPS", "mdps")}

    def estimates(self, batch: Batch, seed: int) -> dict[str, Estimates]:
        return {name: estimates_of(belief, batch.poses) for name, belief in self.beliefs(batch, seed).items()}


def _smoother_stages(c: Any) -> list[Stage]:
    """The paper's four stages for MGL."""
    both, smoothed = {"forward": 0.5, "backward": 0.5}, {"smoothed": 1.0}
    filters = {"filters": 1e-3, "resampling": 1e-5}
    return [
        Stage("filters and encoders", filters | {"encoders": 1e-3}, both, c.first_stage_epochs),
        Stage("posterior bandwidths", {"posterior": 1e-2}, both),
        Stage("smoother", {"smoother": 1e-3, "output": 1e-2}, smoothed),
        Stage(
            "everything but the encoders",
            {"filters": 1e-4, "resampling": 1e-5, "posterior": 1e-4, "smoother": 1e-4, "output": 1e-4},
            smoothed,
        ),
    ]


METHODS: dict[str, Method] = {
    "mdps": Method("MDPS", Smoother, _smoother_stages),
}


def stages(c: Any) -> list[Stage]:
    """The stages of training of the configuration's method."""
    each = METHODS[c.method].stages(c)
    return [replace(s, rates={k: r * c.rate_factor for k, r in s.rates.items()}) for s in each]
