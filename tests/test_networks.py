"""The bearings-only networks against plain nn.Sequential arithmetic in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import mdps
from mdps import networks
from mdps.sequences import for_sequence


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


def test_scale_of_whole_numbers_and_of_another_size():
    p, noise = poses(2, 5).float(), torch.randn(2, 5, 4)
    torch.manual_seed(0)
    first = networks.ResidualDynamics()
    torch.manual_seed(0)
    assert torch.equal(networks.ResidualDynamics((5, 5, 2, 2))(p, noise), first(p, noise))
    with pytest.raises(ValueError, match="scale: expected 4 numbers, of x, y, sine and cosine, got 3"):
        networks.ResidualDynamics((5.0, 5.0, 2.0))


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


SPACE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))


def beliefs_of(*models):
    """Of a filter for each pair of dynamics and likelihood, run as one batch."""
    filters = [mdps.MixtureDensityParticleFilter(SPACE, d, w, 5) for d, w in zip(models[::2], models[1::2])]
    g = torch.Generator().manual_seed(0)
    codes, initial = torch.randn(2, 4, 8, generator=g), torch.randn(2, 5, 3, generator=g)
    seeds = [torch.tensor(i) for i in range(len(filters))]
    return [b.posterior.log_weights for b in mdps.filter_together(filters, [initial] * len(filters), codes, seeds=seeds)]


CHANGES = [
    (lambda network: network.second[0].register_forward_hook(lambda *a: None), "expected layers without hooks"),
    (lambda network: network.first[1].register_full_backward_hook(lambda *a: None), "expected layers without hooks"),
    (lambda network: network.first.register_forward_pre_hook(lambda *a: None), "expected layers without hooks"),
    (lambda network: network.second.register_full_backward_hook(lambda *a: None), "expected layers without hooks"),
    (lambda network: prune.random_unstructured(network.first[0], "weight", 0.5), "expected layers without .*pruning"),
    (lambda network: parametrizations.weight_norm(network.first[0]), "expected nn.Sequential of nn.Linear"),
    (lambda network: network.register_forward_hook(lambda *a: None), "network: expected one without hooks"),
    (lambda network: setattr(network, "forward", print), "network: expected one without hooks or a forward of its own"),
    (lambda network: network.second.__setitem__(1, nn.Tanh()), "network: expected the layers that it was made with"),
]


@pytest.mark.parametrize("change, words", CHANGES)
def test_a_network_that_is_more_than_its_parameters_is_refused(change, words):
    """The operators would go on with the parameters alone, and say nothing."""
    likelihood = networks.PoseLikelihood(nn.Identity())
    change(likelihood.network)
    for call in (lambda: likelihood(torch.zeros(2, 5, 3), torch.zeros(2, 8)), likelihood.for_sequence):
        with pytest.raises(ValueError, match=words):
            call()
    for n in (1, 2):
        with pytest.raises(ValueError, match=words):
            beliefs_of(*[networks.ResidualDynamics(), likelihood] * n)


def test_an_encoder_that_is_more_than_its_parameters_is_refused():
    encoder = networks.ObservationEncoder()
    encoder.layers[0].register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="expected layers without hooks"):
        encoder(torch.zeros(3))


class Halved(networks.PoseLikelihood):
    def forward(self, particles, code):
        return 0.5 * super().forward(particles, code)


class Still(networks.ResidualDynamics):
    def forward(self, particles, noise, action=None):
        return particles


class Prepared(networks.PoseLikelihood):
    """With a for_sequence of its own, but the stack of its base."""

    def for_sequence(self):
        ordinary = super().for_sequence()
        return lambda particles, code: 0.5 * ordinary(particles, code)


class Both(Prepared):
    def forward(self, particles, code):
        return self.for_sequence()(particles, code)

    def for_sequence(self):
        return super().for_sequence()


class Tenth(nn.Module):
    """Protocol and no more."""

    def for_sequence(self):
        return self

    def forward(self, particles, code):
        return -0.1 * particles.square().sum(-1)


class Fifth(Tenth):
    def forward(self, particles, code):
        return 2 * super().forward(particles, code)


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_subclass_overrides_is_called(n):
    def plain(model):
        """Without for_sequence and stack."""
        calls = nn.Module()
        calls.forward, calls.noise_size = model.forward, getattr(model, "noise_size", None)
        return calls

    dynamics = [networks.ResidualDynamics() for _ in range(n)]
    likelihoods = [networks.PoseLikelihood(nn.Identity()) for _ in range(n)]
    for changed in (Halved, Prepared, Both, Fifth):
        models = [changed() if changed is Fifth else changed(nn.Identity()) for _ in range(n)]
        called = [plain(m) for m in models]
        if changed is Prepared:  # its forward is that of its base
            for c, m in zip(called, models):
                c.forward = m.for_sequence()
        got = beliefs_of(*(m for pair in zip(dynamics, models) for m in pair))
        want = beliefs_of(*(m for pair in zip(dynamics, called) for m in pair))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    still = [Still() for _ in range(n)]
    got = beliefs_of(*(m for pair in zip(still, likelihoods) for m in pair))
    want = beliefs_of(*(m for pair in zip([plain(m) for m in still], likelihoods) for m in pair))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [1, 2])
def test_hooks_of_a_model_run_at_every_step(n):
    models = [m for _ in range(n) for m in (networks.ResidualDynamics(), networks.PoseLikelihood(nn.Identity()))]
    want, calls = beliefs_of(*models), []
    for m in models:
        m.register_forward_hook(lambda module, given, out: calls.append(module))
    got = beliefs_of(*models)
    assert len(calls) == n * (3 + 4)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    models[1].register_forward_hook(lambda module, given, out: 0.5 * out)
    assert not torch.allclose(beliefs_of(*models)[0], want[0])


def test_angles_of_what_overrides_are_wrapped():
    class Turned(networks.ResidualDynamics):
        def forward(self, particles, noise, action=None):
            return super().forward(particles, noise, action) + torch.tensor([0.0, 0.0, 6.0])

    f = mdps.MixtureDensityParticleFilter(SPACE, Turned(), networks.PoseLikelihood(nn.Identity()), 5)
    headings = f(torch.randn(2, 4, 8), torch.randn(2, 5, 3), seed=torch.tensor(0)).posterior.means[..., 2]
    assert (headings.abs() <= math.pi).all()


def test_hooks_of_what_a_model_contains():
    mean, calls = networks.ResidualMean(), []
    dynamics, p = mdps.KernelDynamics(mean, 0.5, SPACE), torch.randn(2, 5, 3)
    want = for_sequence([dynamics])(p, torch.zeros(2, 5, 3))
    mean.residual.register_forward_hook(lambda *a: calls.append("residual"))
    torch.testing.assert_close(for_sequence([dynamics])(p, torch.zeros(2, 5, 3)), want)
    torch.testing.assert_close(mean(p), want)
    assert calls == ["residual"] * 2
    mean.register_forward_hook(lambda *a: calls.append("mean"))
    for_sequence([dynamics])(p, torch.zeros(2, 5, 3))
    assert calls[2:] == ["residual", "mean"]


def test_packaged_models_gather_as_before():
    """None of them is taken for one that overrides something."""
    for model in (networks.ResidualDynamics(), networks.PoseLikelihood(nn.Identity())):
        assert type(for_sequence([model])) in (networks.PoseMove, networks.PoseWeigh)
        assert for_sequence([model, model]).weights.dim() == 2
    smoother = networks.PoseSmootherLikelihood(nn.Identity())
    for model in (smoother, networks.ResidualMean(), mdps.KernelDynamics(networks.ResidualMean(), 0.5, SPACE)):
        assert not isinstance(for_sequence([model]), nn.Module)
    assert for_sequence([smoother, smoother]).__name__ == "weigh"


def test_state_dict_is_that_of_plain_layers():
    names = set(networks.ResidualDynamics().state_dict())
    assert names == {
        f"network.{part}.{2 * i}.{kind}" for part in ("first", "second") for i in range(4) for kind in ("weight", "bias")
    }


def test_too_wide():
    with pytest.raises(ValueError, match="at most 256"):
        networks.ParticleNetwork(2, (300,), (1,))
