"""Filters that run as one batch give what they give one by one."""

import pytest
import torch
from test_baseline_filters import make
from test_filters import POSE, pose_data, pose_filter, tensors

import mdps
from mdps import networks
from mdps.networks import PoseLikelihood, ResidualDynamics


class Bearing(torch.nn.Module):
    def forward(self, observations):
        return observations.repeat(1, 1, 8)[..., :8]


def pair(first, second, data, **more):
    initial = [data["initial"], data["initial"].flip(0) + 0.1]
    seeds = [data["seed"], data["seed"] + 1]
    rest = {k: v for k, v in data.items() if k not in ("initial", "seed")} | more
    together = mdps.filter_together([first, second], initial, **rest, seeds=seeds)
    alone = [f(initial=i, seed=s, **rest) for f, i, s in zip((first, second), initial, seeds)]
    return together, alone


def compare(together, alone, parameters):
    for a, b in zip(together, alone, strict=True):
        for x, y in zip(tensors(a), tensors(b), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    truth = torch.zeros(*together[0].posterior.batch_shape, 3)
    gradients = []
    for beliefs in (together, alone):
        loss = sum(b.posterior.log_prob(truth).mean() + b.log_evidence.mean() for b in beliefs)
        gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("directions", [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("masks", [False, True])
def test_filters_without_stack(directions, masks):
    first, second = (pose_filter(reverse=r) for r in directions)
    more = {"lengths": torch.tensor([6, 2, 5, 1]), "observed": torch.rand(4, 6) < 0.7} if masks else {}
    compare(*pair(first, second, pose_data(), **more), [*first.parameters(), *second.parameters()])


@pytest.mark.parametrize("masks", [False, True])
def test_stacked_networks(masks, monkeypatch):
    calls = []
    network = networks.ops.small_network
    monkeypatch.setattr(networks.ops, "small_network", lambda x, w, *a, **k: calls.append(w.shape) or network(x, w, *a, **k))
    first, second = (
        mdps.MixtureDensityParticleFilter(
            POSE, ResidualDynamics(), PoseLikelihood(Bearing()), 7, reverse=r, resampling_bandwidth=0.2
        )
        for r in (False, True)
    )
    more = {"lengths": torch.tensor([6, 2, 5, 1]), "observed": torch.rand(4, 6) < 0.7} if masks else {}
    result = pair(first, second, pose_data(), **more)
    compare(*result, [*first.parameters(), *second.parameters()])


def test_networks_that_differ_get_their_shares():
    first = mdps.MixtureDensityParticleFilter(POSE, ResidualDynamics(), PoseLikelihood(Bearing()), 7)
    second = mdps.MixtureDensityParticleFilter(POSE, ResidualDynamics(width=5), PoseLikelihood(Bearing()), 7, reverse=True)
    assert ResidualDynamics.stack([first.dynamics, second.dynamics]) is None
    compare(*pair(first, second, pose_data()), [*first.parameters(), *second.parameters()])


def test_kinds_that_differ_run_one_by_one():
    first, second = pose_filter(), make("truncated", reverse=True)
    compare(*pair(first, second, pose_data()), [*first.parameters(), *second.parameters()])


def test_soft_filters_of_different_modes_do_not_mix():
    first, second = make("soft").train(), make("soft").eval()
    compare(*pair(first, second, pose_data()), [*first.parameters(), *second.parameters()])


def test_codes_that_differ_run_one_by_one():
    """Encoders of other widths, and filters of another dtype."""
    filters = [
        mdps.MixtureDensityParticleFilter(
            POSE, ResidualDynamics(width=w), PoseLikelihood(networks.ObservationEncoder(w), width=w), 7, reverse=w == 6
        )
        for w in (8, 6)
    ]
    data = pose_data()
    data["observations"] = data["observations"][..., 0]
    compare(*pair(*filters, data), [*filters[0].parameters(), *filters[1].parameters()])
    likelihood = networks.PoseSmootherLikelihood(networks.ObservationEncoder())
    smoother = mdps.MixtureDensityParticleSmoother(*filters, likelihood)
    beliefs = smoother(data["observations"], data["initial"], data["initial"], seed=data["seed"])
    assert beliefs.smoothed.log_weights.isfinite().all()
    with pytest.raises(TypeError, match="initial: expected dtype torch.float64"):
        mdps.filter_together([filters[0], filters[1].double()], [data["initial"]] * 2, data["observations"])


def test_particles_are_checked_for_each():
    first, second = pose_filter(), pose_filter(reverse=True)
    data = pose_data()
    observations, initial = data["observations"], data["initial"]
    with pytest.raises(ValueError, match="initial: expected shape"):
        mdps.filter_together([first, second], [initial, initial[..., :2]], observations)
    with pytest.raises(ValueError, match="initial: expected R = 2, one for each of filters, got 1"):
        mdps.filter_together([first, second], [initial], observations)
    with pytest.raises(ValueError, match="observations: expected R = 2, one for each of filters, got 3"):
        mdps.filter_together([first, second], [initial] * 2, [observations] * 3)
    with pytest.raises(ValueError, match="seeds: expected R = 2, one for each of filters, got 1"):
        mdps.filter_together([first, second], [initial] * 2, observations, seeds=[data["seed"]])
    with pytest.raises(ValueError, match="filters: expected at least one, got none"):
        mdps.filter_together([], [], observations)
