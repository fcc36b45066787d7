"""pose_correlation as map-based localization calls it, T steps on one map in one call, beside grid_sample: time and memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bench.pose_correlation import ORIGIN, W, problem
from torch import Tensor

from gpu.device import Row, Run, attempt, call_seconds, device_seconds, offer
from mdps import ops

STEPS, POSES, SIZE = 100, 250, 2456
"""The paper's long sequences: 1228 m at 2 pixels a metre."""


class Inputs:
    """A map, and templates and poses of each step."""

    def __init__(self, steps: int, poses: int, size: int, device: str) -> None:
        of_map, template, middle, valid = problem(steps * poses, size)
        self.map = of_map[None].to(device).contiguous(memory_format=torch.channels_last)
        scale = torch.rand(steps, 1, 1, 1, generator=torch.Generator().manual_seed(1)) + 0.5
        self.templates = (template * scale).to(device)
        self.poses, self.valid = middle.view(steps, poses, 3).to(device), valid.to(device)
        self.cells = self.valid.flatten().nonzero()[:, 0]  # here: it waits for the GPU, which a CUDA graph cannot

    def ours(self, template: Tensor, poses: Tensor) -> Tensor:
        return ops.pose_correlation(self.map, template, poses, self.valid, origin=ORIGIN)

    def by_grid_sample(self, template: Tensor, poses: Tensor) -> Tensor:
        """Samples of valid cells alone, and a matrix-vector product for each step."""
        cells = self.cells
        x, y = cells % W - ORIGIN[0], cells // W - ORIGIN[1]
        u, v, theta = poses.flatten(0, 1)[:, :, None].unbind(1)
        at = torch.stack([u + theta.cos() * x - theta.sin() * y, v + theta.sin() * x + theta.cos() * y], -1)
        at = at * (2 / (self.map.size(-1) - 1)) - 1
        samples = F.grid_sample(self.map, at[None], align_corners=True)[0].unflatten(1, poses.shape[:2])
        return (samples @ template.flatten(2)[..., cells].transpose(0, 1).unsqueeze(-1)).sum((0, 3))

    def forward(self, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return f(self.templates, self.poses)

    def both(self, f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        wanted = self.templates.detach().requires_grad_(), self.poses.detach().requires_grad_()
        return torch.autograd.grad(f(*wanted).sum(), wanted)


def stage(run: Run) -> Iterator[Row]:
    inputs = Inputs(STEPS, POSES, SIZE, run.device) if run.on_gpu else Inputs(2, 3, 256, run.device)
    others = inputs.by_grid_sample
    yield attempt("scores are grid_sample's", lambda: _agree(inputs))
    yield attempt("forward", lambda: _measure(lambda: inputs.forward(inputs.ours), run))
    yield offer("forward, grid_sample", lambda: _measure(lambda: inputs.forward(others), run))
    yield attempt("forward and backward", lambda: _measure(lambda: inputs.both(inputs.ours), run))
    yield offer("forward and backward, grid_sample", lambda: _measure(lambda: inputs.both(others), run))


def _agree(inputs: Inputs) -> None:
    """grid_sample's coordinates have the error of float32 on a map of thousands of pixels."""
    few = slice(0, 2)
    got, want = (f(inputs.templates[few], inputs.poses[few]) for f in (inputs.ours, inputs.by_grid_sample))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3 * want.abs().max().item())


def _measure(call: Callable[[], Any], run: Run) -> Row:
    row: Row = {"ok": None, "call_ms": 1e3 * call_seconds(call, run)}
    if run.on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        run.wait()
        row["MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        torch.cuda.empty_cache()
    row["device_ms"] = 1e3 * device_seconds(call, run)
    return row
