"""The bearings-only networks against plain nn.Sequential arithmetic in float64."""

import math

import pytest
import torch
from torch import nn

import mdps
from mdps import networks


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def poses(batch, n):
    p = torch.randn(batch, n, 3, dtype=torch.float64) * 4
    p[..., 2] = (torch.rand(batch, n, dtype=torch.float64) * 2 - 1) * math.pi
    return p


def features(p):
    return torch.stack([p[..., 0], p[..., 1], torch.sin(p[..., 2]), torch.cos(p[..., 2])], -1)


def linears(sequential):
    return [m for m in sequential if isinstance(m, nn.Linear)]


def by_hand(layers, x, last_relu):
    """ReLU between the layers, written out."""
    for i, layer in enumerate(layers):
        x = x @ layer.weight.T + layer.bias
        if last_relu or i < len(layers) - 1:
            x = torch.where(x > 0, x, 0.0)
    return x


def joined(network, x, *more):
    first = by_hand(linears(network.first), x, isinstance(network.first[-1], nn.ReLU))
    return by_hand(linears(network.second), torch.cat([first, *more], -1), False)


def widths(sequential):
    return [(m.in_features, m.out_features) for m in linears(sequential)]


def test_architectures_are_those_of_the_paper():
    encoder = networks.ObservationEncoder()
    assert widths(encoder.layers) == [(2, 8), (8, 8), (8, 8)] and isinstance(encoder.layers[-1], nn.ReLU)
    dynamics = networks.ResidualDynamics().network
    assert widths(dynamics.first) == [(2, 8)] + [(8, 8)] * 3 and widths(dynamics.second) == [(12, 8), (8, 8), (8, 8), (8, 4)]
    likelihood = networks.PoseLikelihood(encoder).network
    assert widths(likelihood.first) == [(4, 8), (8, 8), (8, 8)] and widths(likelihood.second) == [(16, 8), (8, 8), (8, 1)]
    smoother = networks.PoseSmootherLikelihood(encoder).network
    assert widths(smoother.first) == [(4, 8)] + [(8, 8)] * 3 and widths(smoother.second) == [(18, 8), (8, 8), (8, 8), (8, 1)]
    assert isinstance(likelihood.first[-1], nn.ReLU) and not isinstance(dynamics.first[-1], nn.ReLU)


def test_encoder():
    encoder, y = networks.ObservationEncoder().double(), torch.randn(3, 5, dtype=torch.float64)
    want = by_hand(linears(encoder.layers), torch.stack([torch.sin(y), torch.cos(y)], -1), True)
    torch.testing.assert_close(encoder(y), want)


def test_dynamics():
    dynamics, p, noise = networks.ResidualDynamics().double(), poses(3, 7), torch.randn(3, 7, 4, dtype=torch.float64)
    residual = (2 / (1 + torch.exp(-joined(dynamics.network, features(p)[..., 2:], noise))) - 1) * torch.tensor([5.0, 5, 2, 2])
    moved = features(p) + residual
    want = torch.stack([moved[..., 0], moved[..., 1], torch.atan2(moved[..., 2], moved[..., 3])], -1)
    torch.testing.assert_close(dynamics(p, noise), want)


def test_dynamics_do_not_see_the_position():
    dynamics, p, noise = networks.ResidualDynamics().double(), poses(1, 9), torch.randn(1, 9, 4, dtype=torch.float64)
    shift = torch.tensor([3.0, -7.0, 0.0])
    torch.testing.assert_close(dynamics(p + shift, noise), dynamics(p, noise) + shift)


def test_likelihood():
    model, p = networks.PoseLikelihood(networks.ObservationEncoder()).double(), poses(3, 7)
    code = model.encode(torch.randn(3, 1, dtype=torch.float64))[:, 0]
    logit = joined(model.network, features(p), code[:, None].expand(-1, 7, -1))[..., 0]
    torch.testing.assert_close(model(p, code), torch.log((1 - 1e-5) / (1 + torch.exp(-logit)) + 1e-5))


def test_smoother_likelihood_and_its_cut():
    model, p = networks.PoseSmootherLikelihood(networks.ObservationEncoder()).double(), poses(3, 7)
    code, f, b = torch.randn(3, 8, dtype=torch.float64), -30 * torch.rand(3, 7).double(), -30 * torch.rand(3, 7).double()
    cut = torch.stack([f, b], -1).clamp(min=-20)
    logit = joined(model.network, features(p), cut, code[:, None].expand(-1, 7, -1))[..., 0]
    torch.testing.assert_close(model(p, code, f, b), torch.log((1 - 1e-5) / (1 + torch.exp(-logit)) + 1e-5))
    far = torch.full_like(f, -1e6)
    assert model(p, code, far, far).isfinite().all()


def test_gradients_reach_every_parameter():
    encoder = networks.ObservationEncoder()
    models = networks.ResidualDynamics(), networks.PoseLikelihood(encoder), networks.PoseSmootherLikelihood(encoder)
    p = poses(4, 20).float()
    code = encoder(torch.randn(4))
    out = models[0](p, torch.randn(4, 20, 4)).sum() + models[1](p, code).sum() + models[2](p, code, p[..., 0], p[..., 1]).sum()
    out.backward()
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_for_sequence_is_forward_and_keeps_nothing():
    model = networks.PoseLikelihood(networks.ObservationEncoder())
    p, code = poses(2, 5).float(), torch.randn(2, 8)
    weigh = model.for_sequence()
    torch.testing.assert_close(weigh(p, code), model(p, code), rtol=0, atol=0)
    before = model(p, code)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.mul_(2)
    assert not torch.equal(model(p, code), before), "an optimizer's step is seen at once"
    for _ in range(2):  # a second backward pass meets a fresh graph
        model.for_sequence()(p, code).sum().backward()


def test_filters_gather_parameters_once_a_sequence(monkeypatch):
    calls, ordinary = [], networks.ParticleNetwork.flat_weights
    monkeypatch.setattr(networks.ParticleNetwork, "flat_weights", lambda self: calls.append(self) or ordinary(self))
    dynamics, likelihood = networks.ResidualDynamics(), networks.PoseLikelihood(networks.ObservationEncoder())
    space = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
    filter_ = mdps.MixtureDensityParticleFilter(space, dynamics, likelihood, 5)
    y, initial, seed = torch.randn(2, 6), poses(2, 5).float(), torch.tensor(0)
    beliefs = filter_(y, initial, seed=seed)
    assert len(calls) == 2

    class Plain(nn.Module):  # without for_sequence
        noise_size = dynamics.noise_size

        def forward(self, particles, noise, action=None):
            return dynamics(particles, noise, action)

    filter_.dynamics = Plain()
    torch.testing.assert_close(filter_(y, initial, seed=seed).posterior.means, beliefs.posterior.means)
    assert len(calls) == 2 + 1 + 5


def test_state_dict_is_that_of_plain_layers():
    names = set(networks.ResidualDynamics().state_dict())
    assert names == {
        f"network.{part}.{2 * i}.{kind}" for part in ("first", "second") for i in range(4) for kind in ("weight", "bias")
    }


def test_too_wide():
    with pytest.raises(ValueError, match="at most 256"):
        networks.ParticleNetwork(2, (300,), (1,))
