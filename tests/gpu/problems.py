"""Every operator on B rows of N particles, as benchmarks, sanitizers and the test for equal bits use it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from table import RawCalls
from test_move_poses import DYNAMICS
from test_small_network import SMOOTHER, n_parameters
from test_weigh_poses import MEASUREMENT
from test_weigh_poses import SMOOTHER as WEIGHER
from torch import Tensor

from mdps import ops


@dataclass(frozen=True)
class Problem:
    name: str
    run: Callable[..., Any]
    args: tuple[Tensor, ...]
    wrt: tuple[int, ...] = ()
    """Arguments that have gradients."""
    pairs: int = 0
    """Pairs that forward, and backward, go through; 0 where the cost is linear. Of iwsg_log_weights and filter_poses, backward
    alone."""

    def forward(self) -> Any:
        with torch.no_grad():
            return self.run(*self.args)

    def both(self) -> tuple[Tensor, ...]:
        """Forward and backward: the gradients of the sum of what depends on the arguments."""
        wanted = [self.args[i].detach().requires_grad_() for i in self.wrt]
        args = list(self.args)
        for i, a in zip(self.wrt, wanted):
            args[i] = a
        out = self.run(*args)
        out = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        return torch.autograd.grad(out, wanted, [torch.ones_like(o) for o in out])

    def raw_calls(self) -> dict[str, Callable[[], Any]]:
        """The operators of torch.ops.mdps that forward and backward call, each with the arguments it got."""
        with RawCalls() as raw:
            self.both() if self.wrt else self.forward()
        result: dict[str, Callable[[], Any]] = {}
        for op, args in raw.calls:
            way = "backward" if "backward" in op._schema.name else "forward"
            result[way] = lambda op=op, args=args: op(*args)
        return result


def problems(B: int, N: int, device: str, dtype: torch.dtype = torch.float32) -> list[Problem]:
    """All operators, poses (x, y, heading) where there are states; the same numbers on every device."""
    g = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(device, dtype)

    seed, logs, angles = torch.tensor(7, device=device), 2 * normal(B, N), normal(B, N)
    bandwidths = torch.tensor([0.7, 0.7, 0.2], device=device, dtype=dtype)
    x, means, others = 5 * normal(B, N, 3), 5 * normal(B, N, 3), 5 * normal(B, N, 3)
    weights = 0.4 * normal(n_parameters(SMOOTHER, 4, 2, 8))
    mixture = means, logs, bandwidths

    def draw(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda seed: f(seed, (B, N), dtype=dtype)

    return [
        Problem("normalize_log_weights", ops.normalize_log_weights, (logs,), (0,)),
        *(
            Problem(f"resample, {s}", lambda *a, s=s: ops.resample(*a, scheme=s), (logs, seed))
            for s in ("stratified", "systematic", "multinomial", "residual")
        ),
        Problem("mixture_resample", lambda *a: ops.mixture_resample(*a, n_angular=1), (*mixture, seed)),
        Problem("mixture_log_prob", lambda *a: ops.mixture_log_prob(*a, n_angular=1), (x, *mixture), (0, 1, 2, 3), B * N * N),
        Problem("iwsg_log_weights", lambda *a: ops.iwsg_log_weights(*a, n_angular=1), (x, *mixture), (1, 2, 3), B * N * N),
        Problem(
            "two_filter_log_prob",
            lambda *a: ops.two_filter_log_prob(*a, n_angular=1),
            (x, *mixture, others, logs.flip(1), bandwidths),
            (0, 1, 2, 3, 4, 5, 6),
            2 * B * N * N,
        ),
        *(_iterative(x, mixture, B * N * N) if N <= 2500 else []),
        Problem("von_mises_log_prob", ops.von_mises_log_prob, (angles, angles.flip(1), logs.exp()), (0, 1, 2)),
        Problem("log_i0", ops.log_i0, (logs.exp(),), (0,)),
        Problem(
            "small_network",
            lambda x, w, e, c: ops.small_network(x, w, SMOOTHER, extra=e, condition=c),
            (normal(B, N, 4), weights, normal(B, N, 2), normal(B, 8)),
            (0, 1, 2, 3),
        ),
        Problem(
            "move_poses",
            lambda x, w, e, s: ops.move_poses(x, e, w, DYNAMICS, s),
            (x, 0.4 * normal(n_parameters(DYNAMICS, 2, 4, 0)), normal(B, N, 4), 5 * normal(4)),
            (0, 1),
        ),
        Problem(
            "weigh_poses",
            lambda x, w, e, c: ops.weigh_poses(x, w, WEIGHER, extra=e, condition=c, least_extra=-1.0),
            (x, weights, normal(B, N, 2), normal(B, 8)),
            (0, 1, 2, 3),
        ),
        _filter(x, bandwidths, normal),
        _scores(B, N, normal),
        Problem("split_seed", lambda seeds: ops.split_seed(seeds, N), (ops.split_seed(seed, B),)),
        Problem("philox_uniform", draw(ops.philox_uniform), (seed,)),
        Problem("philox_normal", draw(ops.philox_normal), (seed,)),
        Problem("philox_von_mises", ops.philox_von_mises, (seed, logs.exp())),
    ]


def _filter(x: Tensor, bandwidths: Tensor, normal: Callable[..., Tensor], T: int = 3) -> Problem:
    """T steps with the networks of the bearings-only task."""
    B, N = x.shape[:2]
    seeds = torch.arange(T * B, device=x.device).reshape(T, B).T
    move, weigh = normal(n_parameters(DYNAMICS, 2, 4, 0)), normal(n_parameters(MEASUREMENT, 4, 0, 8))
    return Problem(
        "filter_poses",
        lambda x, c, b, m, w, s, e: ops.filter_poses(x, c, seeds, b, (m, DYNAMICS), (w, MEASUREMENT), s, noise=e),
        (x, normal(B, T, 8), bandwidths, 0.4 * move, 0.4 * weigh, 5 * normal(4), normal(B, T, N, 4)),
        (0, 1, 2, 3, 4),
        (T - 1) * B * N * N,
    )


def _scores(B: int, N: int, normal: Callable[..., Tensor]) -> Problem:
    """N poses in each of B maps of 8 channels, around their middle; templates of 9 x 9 cells, of which a third is not valid."""
    of_map = normal(B, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    poses = normal(B, N, 3) * 8 + 32
    valid = normal(9, 9) < 0.4
    return Problem(
        "pose_correlation",
        lambda *a: ops.pose_correlation(*a, valid, origin=(4.0, 9.0)),
        (of_map, normal(B, 8, 9, 9), poses),
        (0, 1, 2),
    )


def _iterative(x: Tensor, mixture: tuple[Tensor, ...], pairs: int) -> list[Problem]:
    """Where each row has one block, which goes through its pairs as often as it takes: minutes for long rows."""
    modes = {"n_modes": 3, "radii": [2.0, 2.0, 0.8], "n_angular": 1}
    return [
        Problem("transport_resample", lambda *a: ops.transport_resample(*a, n_angular=1), (x, mixture[1]), (0, 1), pairs),
        Problem("find_modes", lambda *a: ops.find_modes(*a, **modes), mixture, pairs=pairs),
    ]


def mixture_problem(N: int, device: str, heading: float = 0.2) -> tuple[Tensor, ...]:
    """N queries and N poses in a 20 m box, bandwidths of 0.7 m and in heading: most pairs underflow, as a filter's do."""
    g = torch.Generator().manual_seed(0)
    x, means = (torch.rand(1, N, 3, generator=g) * 20 for _ in range(2))
    args = x, means, torch.full((1, N), -math.log(N)), torch.tensor([0.7, 0.7, heading])
    return tuple(a.to(device) for a in args)
