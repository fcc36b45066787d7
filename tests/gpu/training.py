"""The paper's smoother in training on the device: a whole optimizer step, of one run and of several at once, in a CUDA graph.

From the steps' times follows how long a whole training takes here: EPOCHS are those of a committed run of the paper's size;
validation and starts of stages come on top.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import mdps
from gpu.device import Row, Run, attempt, call_seconds, capture, device_seconds
from mdps import ops
from mdps.networks import ObservationEncoder, PoseLikelihood, PoseSmootherLikelihood, ResidualDynamics

B, N, T = 32, 50, 50
STEPS = 157
"""Of an epoch: 5000 sequences in batches of 32."""
RUN = Path(__file__).resolve().parents[2] / "training/results/bearings_only/figure_2/mdps_run_00.json"
EPOCHS = {stage["name"]: stage["epochs"] for stage in json.loads(RUN.read_text())["stages"]}
TARGET_MINUTES = {1: 10.0, 11: 30.0}
"""By the number of runs at once: for one H100, with the whole step in a CUDA graph."""


class Training:
    """Smoothers of the bearings-only task that learn at once, on random numbers, of which only the sizes matter.

    Stages: "filters" learns both filters on their beliefs, "smoother" the rest and "everything" all on the smoothed belief.
    """

    def __init__(self, device: str, stage: str, n_runs: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.stage = stage
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.encoders = [ObservationEncoder().to(device) for _ in range(n_runs)]
            self.smoothers = [smoother().to(device) for _ in range(n_runs)]
        self.truth = (3 * torch.randn(B, T, 3, generator=g)).to(device)
        self.observations = torch.randn(B, T, generator=g).to(device)
        self.initial = self.truth[:, :1] + torch.randn(B, N, 3, generator=g).to(device)
        self.final = (10 * torch.randn(B, N, 3, generator=g)).to(device)
        self.seeds = [ops.make_seed(torch.Generator().manual_seed(r), batch=B).to(device) for r in range(n_runs)]
        self.groups = [self._learning(e, s) for e, s in zip(self.encoders, self.smoothers)]
        self.optimizers = [torch.optim.Adam(p, 1e-3, fused=True, capturable=True) for p in self.groups]

    def _learning(self, encoder: nn.Module, smoother: mdps.MixtureDensityParticleSmoother) -> list[nn.Parameter]:
        """The parameters that this stage teaches; the others are frozen."""
        filters = nn.ModuleList([encoder, smoother.forward_filter, smoother.backward_filter])
        rest = nn.ModuleList([smoother.likelihood, smoother.posterior_bandwidth])
        for module, learns in ((filters, self.stage != "smoother"), (rest, self.stage != "filters")):
            module.requires_grad_(learns)
        return [p for p in (*filters.parameters(), *rest.parameters()) if p.requires_grad]

    def losses(self) -> list[Tensor]:
        """Of each run: the mean of -log density at the truth."""
        n = len(self.smoothers)
        codes = [encoder(self.observations) for encoder in self.encoders]
        starts = ([self.initial] * n, [self.final] * n)
        if self.stage == "filters":
            pairs = mdps.filter_both(self.smoothers, *starts, codes, seeds=self.seeds)
            return [-sum(b.posterior.log_prob(self.truth).mean() for b in pair) / 2 for pair in pairs]
        beliefs = mdps.smooth_together(self.smoothers, *starts, codes, seeds=self.seeds)
        return [-b.smoothed.log_prob(self.truth).mean() for b in beliefs]

    def step(self) -> Tensor:
        """Forward, backward, clipping and Adam of every run; the losses (R,)."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses = torch.stack(self.losses())
        losses.sum().backward()
        for parameters, optimizer in zip(self.groups, self.optimizers):
            nn.utils.clip_grad_norm_(parameters, 10.0)
            optimizer.step()
        return losses.detach()

    def state(self) -> dict[str, list]:
        """What a step changes."""
        optimizers = [copy.deepcopy(o.state_dict()["state"]) for o in self.optimizers]
        return {"parameters": [[p.detach().clone() for p in group] for group in self.groups], "optimizers": optimizers}

    def restore(self, state: dict[str, list]) -> None:
        """Back to an earlier state, in the same memory, which a captured graph goes on using."""
        with torch.no_grad():
            for group, values, optimizer, moments in zip(
                self.groups, state["parameters"], self.optimizers, state["optimizers"]
            ):
                for i, (parameter, value) in enumerate(zip(group, values)):
                    parameter.copy_(value)
                    for name, moment in optimizer.state[parameter].items():
                        moment.copy_(moments[i][name])


def smoother() -> mdps.MixtureDensityParticleSmoother:
    space = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
    options = {"posterior_bandwidth": (2.0, 2.0, 0.17), "minimum_bandwidth": (0.1, 0.1, 0.03)}

    def one(reverse: bool) -> mdps.MixtureDensityParticleFilter:
        networks, width = (ResidualDynamics(), PoseLikelihood(nn.Identity())), (2.0, 2.0, 0.17)
        return mdps.MixtureDensityParticleFilter(space, *networks, N, reverse=reverse, resampling_bandwidth=width, **options)

    return mdps.MixtureDensityParticleSmoother(one(False), one(True), PoseSmootherLikelihood(nn.Identity()), **options)


def stage(run: Run) -> Iterator[Row]:
    if not run.on_gpu:
        yield {"name": "training", "ok": None, "note": "on a GPU alone"}
        return
    for n_runs, target in TARGET_MINUTES.items():
        yield attempt(
            f"everything, {n_runs} at once, replay equals eager", lambda: _replay(Training(run.device, "everything", n_runs))
        )
        seconds = {}
        for name in EPOCHS:
            row = attempt(f"{name}, {n_runs} at once", lambda: _measure(Training(run.device, name, n_runs).step, run))
            if row["ok"]:
                seconds[name] = row["device_us"] / 1e6
            yield row
        whole: Row = {"name": f"whole training, {n_runs} at once", "target_minutes": target}
        if seconds.keys() != EPOCHS.keys():
            yield {**whole, "ok": None, "note": "not every stage could be timed"}
            continue
        minutes = sum(STEPS * EPOCHS[name] * s for name, s in seconds.items()) / 60
        yield {**whole, "ok": minutes <= target, "minutes": minutes}


def _measure(step: Callable[[], Tensor], run: Run) -> Row:
    eager = call_seconds(step, run, 0.2)
    return {"B": B, "N": N, "T": T, "call_us": 1e6 * eager, "device_us": 1e6 * device_seconds(step, run)}


def _replay(training: Training) -> Row:
    """Three replays of a captured step: the losses and parameters that three eager steps from the same state give."""
    replay, out = capture(training.step)
    before = training.state()
    by_replay = []
    for _ in range(3):
        replay()
        by_replay.append(out.clone())
    after = training.state()
    training.restore(before)
    by_hand = [training.step() for _ in range(3)]
    torch.testing.assert_close(torch.stack(by_replay), torch.stack(by_hand), rtol=1e-3, atol=1e-5)
    for group, values in zip(training.groups, after["parameters"]):
        for parameter, value in zip(group, values):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-2, atol=1e-3)
    assert not torch.equal(by_replay[0], by_replay[2]), "the parameters did not move"
    return {"replays": len(by_replay)}
