"""The smoother on maps in training, of the paper's size: whole optimizer steps on random images and maps, time and peak memory.

Encoders learn from sequences of 10 steps, three at once; on sequences of 100 steps, two at once, they are frozen.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpu.device import Row, Run, attempt, call_seconds, offer
from mdps import ops
from mdps.localization import FULL, SMALL, Encoders, EncoderSizes, MapSmoother, anywhere, around


class Problem(NamedTuple):
    """How large a step is."""

    sizes: EncoderSizes
    batch: int
    steps: int
    map_pixels: int
    image_pixels: int
    first: tuple[int, int]
    """Particles at the first and at the last step, before there are `particles`."""
    particles: int
    learns: bool
    """Whether the encoders do."""


SHORT = Problem(FULL, 3, 10, 800, 256, (1000, 1500), 250, True)
LONG = Problem(FULL, 2, 100, 2456, 256, (1000, 1500), 250, False)
TINY = Problem(SMALL, 1, 2, 64, 32, (8, 9), 5, True)


class Training:
    """A model, its optimizer and a batch."""

    def __init__(self, p: Problem, device: str) -> None:
        g = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = MapSmoother(Encoders(p.sizes), p.particles).to(device)
        self.problem = p
        self.model.encoders.requires_grad_(p.learns)
        self.parameters = [x for x in self.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, 1e-4, fused=True)
        shape = (p.batch, p.steps, 3, p.image_pixels, p.image_pixels)
        self.images = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8).to(device)
        half = p.image_pixels / 2
        self.camera = torch.tensor([half, half, half - 0.5, half - 0.5], device=device).expand(p.batch, p.steps, 4)
        self.classes = torch.randint(0, 7, (p.batch, 3, p.map_pixels, p.map_pixels), generator=g, dtype=torch.uint8).to(device)
        self.poses = torch.randn(p.batch, p.steps, 3, generator=g).to(device)
        self.actions = torch.randn(p.batch, p.steps, 3, generator=g).to(device)
        side = p.map_pixels / 2
        seed = torch.tensor(1, device=device)
        self.initial = around(self.poses[:, 0], p.first[0], 50.0, 100.0, seed)
        self.final = anywhere(p.batch, p.first[1], (side, side), seed)
        self.seed = ops.make_seed(g, batch=p.batch).to(device)

    def step(self) -> Tensor:
        """Encode, filter, smooth, backward and Adam; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        p = self.problem
        with torch.set_grad_enabled(p.learns):
            chunk = None if p.learns else 10
            scene = self.model.observe(self.images, self.camera, self.classes, 2.0, chunk=chunk)
        beliefs = self.model(scene, self.initial, self.final, self.actions, seed=self.seed)
        parts = beliefs.smoothed, beliefs.forward.posterior, beliefs.backward.posterior
        loss = -torch.stack([part.log_prob(self.poses).mean() for part in parts]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 300.0)
        self.optimizer.step()
        return loss.detach()


def stage(run: Run) -> Iterator[Row]:
    yield attempt("small networks", lambda: _measure(TINY, run))
    if run.on_gpu:
        yield offer("T = 10, encoders learn", lambda: _measure(SHORT, run))  # needs torchvision, and much memory
        yield offer("T = 100, encoders frozen", lambda: _measure(LONG, run))


def _measure(p: Problem, run: Run) -> Row:
    if run.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training = Training(p, run.device)
    losses = [training.step() for _ in range(2)]
    assert all(loss.isfinite() for loss in losses), losses
    row: Row = {"B": p.batch, "T": p.steps, "map": p.map_pixels, "call_ms": 1e3 * call_seconds(training.step, run, 0.2)}
    if run.on_gpu:
        row["peak_MB"] = torch.cuda.max_memory_allocated() / 1e6
        torch.cuda.empty_cache()
    return row
