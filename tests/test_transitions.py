import copy
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from test_filters import POSE, assert_same, names, within
from torch import nn

import mdps
from mdps import networks, ops
from mdps.sequences import for_sequence
from mdps.transitions import von_mises_table

HEADING = mdps.StateSpace(angular=("heading",))


class Still(nn.Module):
    def forward(self, particles, action=None):
        return particles if action is None else particles + action.unsqueeze(1)


def upper_tail(angle, concentration):
    """1 - F by scipy's quadrature, relative to the density at the angle."""

    def density(t):
        return math.exp(-2 * concentration * (math.sin(t / 2) ** 2 - math.sin(angle / 2) ** 2))

    end = min(math.pi, angle + 60 / math.sqrt(concentration))
    points = [angle + (end - angle) * x for x in (1e-3, 1e-2, 0.1, 0.3)]
    integral = scipy.integrate.quad(density, angle, end, points=points, epsabs=0, epsrel=1e-12)[0]
    log_density = -2 * concentration * math.sin(angle / 2) ** 2 - math.log(2 * math.pi * scipy.special.i0e(concentration))
    return log_density + math.log(integral)


# ---- Von Mises draws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [1e-4, 0.032, 0.173, 0.5, 0.9, 1.25, 3.0, 1e3])
def test_the_map_from_normal_numbers_is_the_von_mises_quantile(bandwidth):
    angles, slopes = von_mises_table(bandwidth**-2)
    z = np.linspace(0, 9, len(angles))
    for k in (1, 7, 64, 130, 300, 450, 550):
        got, gap = upper_tail(angles[k].item(), bandwidth**-2), math.pi - angles[k].item()
        if gap < 1e-12:  # the tail is within the rounding of the angle
            continue
        rounding = 1e-15 / gap
        assert abs(got - scipy.special.log_ndtr(-z[k])) < 1e-7 + rounding, (z[k], angles[k])
    inner = (angles[2:] - angles[:-2]) / (z[2] - z[0])
    assert ((inner - slopes[1:-1]).abs() < 1e-3 * slopes.max() + 1e-12).all()


@pytest.mark.parametrize("bandwidth", [0.05, 0.5, 1.25, 4.0])
def test_angles_between_the_entries_of_the_table(bandwidth):
    """Against scipy's distribution function."""
    dynamics = mdps.KernelDynamics(Still(), bandwidth, HEADING).double()
    z = torch.linspace(-4.5, 4.5, 3001, dtype=torch.float64).add(0.0007).unsqueeze(-1)
    angle = dynamics.spread(z).squeeze(-1)
    want = scipy.special.ndtr(z.squeeze(-1).numpy())
    np.testing.assert_allclose(scipy.stats.vonmises.cdf(angle.numpy(), bandwidth**-2), want, atol=2e-7)
    assert torch.equal(dynamics.spread(-z), -dynamics.spread(z)) and (angle.diff() >= 0).all()
    assert (dynamics.spread(torch.tensor([[40.0], [-40.0]]).double()).abs() < math.pi + 1e-6).all()
    single = mdps.KernelDynamics(Still(), bandwidth, HEADING).spread(z.float()).squeeze(-1)
    torch.testing.assert_close(single.double(), angle, atol=3e-6 * max(1.0, min(bandwidth, 1.0)), rtol=1e-6)


def test_draws_have_the_density():
    """Frequencies of draws in cells against the integral of the density that `mixture_log_prob` gives for this transition."""
    bandwidths = (0.7, 1.3, 1.25, 0.4)
    space = mdps.StateSpace(linear=("x", "y"), angular=("a", "b"))
    dynamics = mdps.KernelDynamics(Still(), bandwidths, space)
    n = 200_000
    centre = torch.tensor([1.0, -2.0, 3.0, -3.1])
    noise = ops.philox_normal(torch.tensor(3), (1, n, 4))
    draws = space.wrap(dynamics(centre.expand(1, n, 4), noise)).squeeze(0)
    for d, name in enumerate(space.names):
        one = space.subspace(name)
        low, high = (-math.pi, math.pi) if name in "ab" else (centre[d] - 9, centre[d] + 9)
        edges = torch.linspace(float(low), float(high), 41)
        counts = torch.histogram(draws[:, d], edges).hist
        x = torch.linspace(float(low), float(high), 40 * 64 + 1, dtype=torch.float64)
        mixture = centre[d].double().view(1, 1), torch.zeros(1).double(), torch.tensor(bandwidths[d : d + 1]).double()
        density = ops.mixture_log_prob(x.unsqueeze(-1), *mixture, n_angular=one.n_angular).exp()
        cell = torch.stack([torch.trapezoid(density[64 * i : 64 * i + 65], x[64 * i : 64 * i + 65]) for i in range(40)])
        assert abs(cell.sum().item() - 1) < 1e-5
        error = (counts / n - cell).abs()
        assert (error < 5 * (cell * (1 - cell) / n).sqrt() + 2 / n).all(), (name, error.max())
    assert (torch.corrcoef(draws.T) - torch.eye(4)).abs().max() < 0.02


def test_kernel_dynamics_as_a_filters_dynamics():
    """A stationary chain stays as it is; and a sequence's function is the module's."""
    a, B, N = 0.8, 400, 50
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, a)

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gathered = linear, 0

        def for_sequence(self):
            self.gathered += 1
            return lambda particles, action=None: self.linear(particles)

        def forward(self, particles, action=None):
            return self.linear(particles)

    dynamics = mdps.KernelDynamics(Mean(), math.sqrt(1 - a * a), names(1))
    f = mdps.TruncatedGradientParticleFilter(names(1), dynamics, lambda x, y: 0 * x[..., 0], N)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        beliefs = f(torch.zeros(B, 5), torch.randn(B, N, 1, generator=g), seed=torch.tensor(0))
    assert dynamics.network.gathered == 1
    x = beliefs.posterior.means[:, -1, :, 0].double()
    within(x.mean(1, keepdim=True), torch.zeros(1))
    within((x**2).mean(1, keepdim=True), torch.ones(1))
    particles, noise = torch.randn(2, 3, 1), torch.randn(2, 3, 1)
    torch.testing.assert_close(dynamics.for_sequence()(particles, noise), dynamics(particles, noise))
    torch.testing.assert_close(for_sequence([dynamics])(particles, noise), a * particles + math.sqrt(1 - a * a) * noise)


def test_modules():
    dynamics = mdps.KernelDynamics(Still(), (0.5, 0.6, 0.7), POSE)
    assert dynamics.noise_size == 3 and not dynamics.state_dict()
    torch.testing.assert_close(dynamics.bandwidths, torch.tensor([0.5, 0.6, 0.7]))
    noise, action = torch.randn(2, 4, 3), torch.randn(2, 3)
    particles = torch.randn(2, 4, 3, requires_grad=True)
    moved = dynamics(particles, noise, action)
    torch.testing.assert_close(moved - dynamics.spread(noise), dynamics.mean(particles, action))
    torch.testing.assert_close(torch.autograd.grad(moved.sum(), particles)[0], torch.ones(2, 4, 3))
    assert_same([copy.deepcopy(dynamics)(particles, noise, action)], [moved])
    assert mdps.KernelDynamics(Still(), 0.5, names(2))(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)).eq(0.5).all()
    assert dynamics.double()(particles.double(), noise.double()).dtype == torch.float64


@pytest.mark.parametrize("bandwidths", [(0.1, 0.2), (0.1, 0.2, 0.0), -1.0, math.inf, math.nan])
def test_errors_of_bandwidths(bandwidths):
    with pytest.raises(ValueError, match="bandwidths: expected one positive number or 3, for .*, got"):
        mdps.KernelDynamics(Still(), bandwidths, POSE)


# ---- The loss -----------------------------------------------------------------------------------------------------------


def test_transition_loss_by_hand():
    g = torch.Generator().manual_seed(0)
    states, actions = torch.randn(3, 5, 3, generator=g), torch.randn(3, 5, 3, generator=g)
    actions[:, 0] = math.nan  # never used
    states[..., 2] = math.pi - 0.1 * torch.rand(3, 5, generator=g)
    states[:, ::2, 2] -= 2 * math.pi  # either side of the seam
    got = mdps.transition_loss(mdps.KernelDynamics(Still(), 1.0, POSE), states, POSE, actions)
    s, u = states.double(), actions.double()
    want = torch.zeros(3, 4, dtype=torch.float64)
    for t in range(4):
        mu, x = s[:, t] + u[:, t + 1], s[:, t + 1]
        want[:, t] = ((mu - x)[:, :2] ** 2).sum(-1)
        want[:, t] += (mu[:, 2].sin() - x[:, 2].sin()) ** 2 + (mu[:, 2].cos() - x[:, 2].cos()) ** 2
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_transition_loss_finds_a_linear_model():
    """Its minimum is the least-squares solution."""
    g = torch.Generator().manual_seed(0)
    A = torch.tensor([[0.9, 0.3], [-0.3, 0.8]])
    steps = [torch.randn(64, 2, generator=g)]
    for _ in range(9):
        steps.append(steps[-1] @ A.T + 0.1 * torch.randn(64, 2, generator=g))
    states = torch.stack(steps, 1)

    class Linear(nn.Linear):
        def forward(self, particles, action=None):
            return super().forward(particles)

    dynamics = mdps.KernelDynamics(Linear(2, 2, bias=False), 0.1, names(2))
    optimizer = torch.optim.LBFGS(dynamics.parameters(), max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = mdps.transition_loss(dynamics, states, names(2)).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    want = torch.linalg.lstsq(states[:, :-1].reshape(-1, 2), states[:, 1:].reshape(-1, 2)).solution.T
    torch.testing.assert_close(dynamics.network.weight.detach(), want, atol=1e-3, rtol=1e-3)
    assert (want - A).abs().max() < 0.02


def test_transition_loss_errors():
    dynamics = mdps.KernelDynamics(Still(), 1.0, POSE)
    with pytest.raises(ValueError, match=r"states: expected shape \(B, T, D\) with T >= 2 and D = 3, got \(2, 1, 3\)"):
        mdps.transition_loss(dynamics, torch.zeros(2, 1, 3), POSE)
    with pytest.raises(ValueError, match=r"actions: expected shape \(B, T, ...\) with \(B, T\) = \(2, 4\), got \(2, 3, 1\)"):
        mdps.transition_loss(dynamics, torch.zeros(2, 4, 3), POSE, torch.zeros(2, 3, 1))
    dynamics.network.forward = lambda particles, action: particles[..., :2]
    with pytest.raises(ValueError, match=r"transition.mean: expected to return shape \(6, 1, 3\), got \(6, 1, 2\)"):
        mdps.transition_loss(dynamics, torch.zeros(2, 4, 3), POSE)


# ---- The pose network ---------------------------------------------------------------------------------------------------


def test_residual_mean_by_hand():
    torch.manual_seed(0)
    model = networks.ResidualMean().double()
    p = stationary_poses(3, 7)
    x = torch.stack([p[..., 2].sin(), p[..., 2].cos()], -1)
    network = model.residual.network
    assert sum(w.numel() for w in model.parameters()) == (2 * 8 + 8) + 5 * (8 * 8 + 8) + 8 * 8 + 8 + (8 * 4 + 4)
    first, second = ([m for m in part if isinstance(m, nn.Linear)] for part in (network.first, network.second))
    for i, layer in enumerate(first):
        x = x @ layer.weight.T + layer.bias
        x = x.relu() if i < len(first) - 1 else x
    for i, layer in enumerate(second):
        x = x @ layer.weight.T + layer.bias
        x = x.relu() if i < len(second) - 1 else 1 / (1 + (-x).exp())
    x = (2 * x - 1) * torch.tensor([5.0, 5, 2, 2])
    heading = torch.atan2(p[..., 2].sin() + x[..., 2], p[..., 2].cos() + x[..., 3])
    want = torch.cat([p[..., :2] + x[..., :2], heading.unsqueeze(-1)], -1)
    torch.testing.assert_close(model(p), want)
    torch.testing.assert_close(model.for_sequence()(p, None), want)


def stationary_poses(B, N):
    g = torch.Generator().manual_seed(0)
    return 3 * torch.randn(B, N, 3, generator=g, dtype=torch.float64)


def test_residual_mean_learns_to_drive():
    """Poses that go straight on, one unit a step."""
    torch.manual_seed(0)
    heading = (torch.rand(256, 1) * 2 - 1) * math.pi
    steps = torch.arange(3.0)
    states = torch.stack([heading.cos() * steps, heading.sin() * steps, heading.expand(-1, 3)], -1)
    dynamics = mdps.KernelDynamics(networks.ResidualMean(), (1.0, 1.0, 1.25), POSE)
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=1e-2)
    first = None
    for _ in range(300):
        loss = mdps.transition_loss(dynamics, states, POSE).mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 < 0.5 < first
