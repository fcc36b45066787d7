"""Metrics against arithmetic by hand and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from mdps import Mixture, StateSpace, metrics

SPACE = StateSpace(linear=("x", "y"), angular=("heading",))


def belief(batch=(2, 3), n=4):
    g = torch.Generator().manual_seed(0)
    means = torch.randn(*batch, n, 3, generator=g, dtype=torch.float64)
    log_weights = torch.randn(*batch, n, generator=g, dtype=torch.float64).log_softmax(-1)
    return Mixture(means, log_weights, torch.tensor([0.5, 0.7, 0.3], dtype=torch.float64), SPACE)


def test_negative_log_likelihood_against_scipy():
    m = belief()
    truth = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got, floored = metrics.negative_log_likelihood(m, truth), metrics.negative_log_likelihood(m, truth, density_floor=0.01)
    for b in np.ndindex(2, 3):
        x, means, weights = truth[b].numpy(), m.means[b].numpy(), m.log_weights[b].exp().numpy()
        kernels = stats.norm.pdf(x[0], means[:, 0], 0.5) * stats.norm.pdf(x[1], means[:, 1], 0.7)
        density = (weights * kernels * stats.vonmises.pdf(x[2], 0.3**-2, loc=means[:, 2])).sum()
        assert got[b].item() == pytest.approx(-math.log(density), abs=1e-9)
        assert floored[b].item() == pytest.approx(-math.log(density + 0.01), abs=1e-9)


def test_floor_bounds_the_loss_and_its_gradient():
    truth = torch.full((2, 3, 3), 1e3, dtype=torch.float64)
    truth[..., 2] = 0
    worst = metrics.negative_log_likelihood(belief(), truth, density_floor=1e-8)
    torch.testing.assert_close(worst, torch.full_like(worst, 18.420680743952367))


def test_errors_of_estimates():
    a = torch.tensor([[0.0, 0.0, math.radians(179)], [3.0, 4.0, 0.0]])
    b = torch.tensor([[3.0, 4.0, math.radians(-179)], [3.0, 4.0, math.pi]])
    torch.testing.assert_close(metrics.position_error(a, b), torch.tensor([5.0, 0.0]))
    torch.testing.assert_close(metrics.heading_error(a, b), torch.tensor([math.radians(2), math.pi]), atol=1e-5, rtol=0)


def test_summary_averages_everything():
    means = torch.tensor([[[[1.0, 0.0, math.pi - 0.1], [1.0, 2.0, -math.pi + 0.1]]]])
    m = Mixture(means, torch.full((1, 1, 2), 0.5).log(), torch.tensor([1.0, 1.0, 1.0]), SPACE)
    got = metrics.summarize(m, torch.tensor([[[1.0, 1.0, -math.pi + 0.2]]]))
    assert got["position_error"] == pytest.approx(0, abs=1e-6)
    assert got["heading_error_degrees"] == pytest.approx(math.degrees(0.2), abs=1e-3)
    assert set(got) == {"nll", "position_error", "heading_error_degrees"}
