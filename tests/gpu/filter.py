"""The paper's filter on the device: a step, a sequence and a training step, in CUDA graphs and without."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import mdps
from gpu.device import Row, Run, attempt, call_seconds, capture, device_seconds
from mdps import ops
from mdps.networks import ObservationEncoder, PoseLikelihood, ResidualDynamics

B, N, T = 32, 50, 50
STEP_TARGET_US = 60.0


class Inputs:
    """The filter of the bearings-only task, with B sequences of T steps: random numbers, of which only the sizes matter."""

    def __init__(self, device: str) -> None:
        g = torch.Generator().manual_seed(0)
        space = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.filter = mdps.MixtureDensityParticleFilter(
                space,
                ResidualDynamics(),
                PoseLikelihood(ObservationEncoder()),
                N,
                posterior_bandwidth=(2.0, 2.0, 0.17),
                resampling_bandwidth=(0.75, 0.75, 0.17),
            ).to(device)
        self.truth = (3 * torch.randn(B, T, 3, generator=g)).to(device)
        self.observations = torch.randn(B, T, generator=g).to(device)
        self.initial = self.truth[:, :1] + torch.randn(B, N, 3, generator=g).to(device)
        self.seeds = ops.make_seed(torch.Generator().manual_seed(1), batch=B).to(device)

    def state(self) -> mdps.FilterState:
        """After the first observation."""
        with torch.no_grad():
            return self.filter.start(self.initial, self.observations[:, 0], seed=self.seeds)

    def step(self, state: mdps.FilterState) -> tuple[Tensor, ...]:
        with torch.no_grad():
            s = self.filter.step(state, self.observations[:, 1])
        return *s.posterior, s.ancestors, s.collapsed, s.log_evidence, s.ess

    def sequence(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            beliefs = self.filter(self.observations, self.initial, seed=self.seeds)
        return beliefs.posterior.means, beliefs.posterior.log_weights, beliefs.ancestors

    def training_step(self) -> tuple[Tensor, ...]:
        """The loss and its gradients to every parameter."""
        beliefs = self.filter(self.observations, self.initial, seed=self.seeds)
        loss = -beliefs.posterior.log_prob(self.truth).mean()
        return loss.detach(), *torch.autograd.grad(loss, list(self.filter.parameters()))


def stage(run: Run) -> Iterator[Row]:
    if not run.on_gpu:
        yield {"name": "filter", "ok": None, "note": "on a GPU alone"}
        return
    inputs = Inputs(run.device)
    state = inputs.state()
    yield attempt("filter step", lambda: _measure(lambda: inputs.step(state), run, STEP_TARGET_US))
    yield attempt("filter step, replay equals eager", lambda: _replay(lambda: inputs.step(state), inputs, exact=True))
    yield attempt("filter, 50 steps", lambda: _measure(inputs.sequence, run))
    yield attempt("filter, 50 steps, replay equals eager", lambda: _replay(inputs.sequence, inputs, exact=True))
    yield attempt("training step, replay equals eager", lambda: _replay(inputs.training_step, inputs, exact=False))
    yield attempt("training step", lambda: _measure(inputs.training_step, run))
    yield _kernels("filter step, kernels", lambda: inputs.step(state))
    yield _kernels("training step, kernels", inputs.training_step)


def _kernels(name: str, call: Callable[[], Any]) -> Row:
    """What the device does in one call, by torch's profiler: how many kernels, and those that take longest."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        found = [
            (e.self_device_time_total, e.count, e.key[:80]) for e in profile.key_averages() if e.self_device_time_total > 0
        ]
    except Exception as error:
        return {"name": name, "ok": None, "note": f"no profile: {error}"[:300]}
    longest = [{"us": us, "calls": n, "kernel": kernel} for us, n, kernel in sorted(found, reverse=True)[:25]]
    return {
        "name": name,
        "ok": None,
        "kernels": sum(n for _, n, _ in found),
        "us": sum(us for us, _, _ in found),
        "longest": longest,
    }


def _measure(call: Callable[[], Any], run: Run, target_us: float | None = None) -> Row:
    device_us, call_us = 1e6 * device_seconds(call, run), 1e6 * call_seconds(call, run, 0.2)
    ok = None if target_us is None else device_us <= target_us
    return {"ok": ok, "B": B, "N": N, "T": T, "device_us": device_us, "call_us": call_us, "target_us": target_us}


def _replay(call: Callable[[], tuple[Tensor, ...]], inputs: Inputs, exact: bool) -> Row:
    """Three replays with new seeds in the same tensor: the numbers that eager calls with these seeds have, and new ones.

    Not `exact`: gradients of torch's own operators are sums in any order.
    """
    replay, out = capture(call)
    before, (rtol, atol) = inputs.seeds.clone(), (0.0, 0.0) if exact else (1e-3, 1e-5)
    seen: list[Tensor] = []
    for seed in (11, 12, 13):
        inputs.seeds.copy_(ops.make_seed(torch.Generator().manual_seed(seed), batch=B))
        replay()
        got = [o.clone() for o in out]
        for g, w in zip(got, call(), strict=True):
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol)
        assert all(not torch.equal(got[0], other) for other in seen), "the replay has the numbers of another seed"
        seen.append(got[0])
    inputs.seeds.copy_(before)
    return {"replays": len(seen)}
