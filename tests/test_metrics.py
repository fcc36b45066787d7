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


def two_places():
    """At step 0 the truth is the higher of two places, at step 1 the lower one across the seam, at step 2 neither."""
    places = torch.tensor([[0.0, 0.0, 0.0], [20.0, 0.0, math.pi - 0.01]], dtype=torch.float64)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64)
    m = Mixture(places.expand(1, 3, 2, 3), weights.log().expand(1, 3, 2), torch.tensor([0.5, 0.5, 0.1]).double(), SPACE)
    truth = [[0.6, 0.8, 0.2], [20.0, 0.0, -math.pi + 0.02], [20.0, 0.0, 0.0]]
    return m, torch.tensor([truth], dtype=torch.float64)


def test_errors_of_the_best_mode():
    position, heading = metrics.mode_errors(*two_places(), radii=(5.0, 5.0, 0.5))
    torch.testing.assert_close(position, torch.tensor([[1.0, 20.0, 20.0]]).double())
    torch.testing.assert_close(heading, torch.tensor([[0.2, math.pi - 0.02, 0.0]], dtype=torch.float64), atol=1e-9, rtol=0)


def test_recall_of_modes():
    m, truth = two_places()

    def hits(**kwargs):
        return metrics.mode_hits(m, truth, (5.0, 5.0, 0.5), **kwargs)[0].tolist()

    assert hits(position=2.0, heading=0.3) == [True, True, False]
    assert hits(position=2.0, heading=0.3, k=1) == [True, False, False]
    assert hits(position=0.9, heading=0.3) == [False, True, False]
    assert hits(position=2.0, heading=0.1) == [False, True, False]
    assert hits(position=2.0, heading=3.2) == [True, True, True]
    assert hits(position=2.0, heading=0.3, k=2) == hits(position=2.0, heading=0.3, k=9)
    assert metrics.mode_recall(m, truth, 5.0, position=2.0, heading=0.3) == pytest.approx(2 / 3)
    nobody = Mixture(m.means, torch.full_like(m.log_weights, -math.inf), m.bandwidths, SPACE)
    assert metrics.mode_recall(nobody, truth, 5.0, position=2.0, heading=0.3) == 0
    spoiled = torch.where(torch.arange(3)[:, None] == 0, math.nan, truth)
    assert metrics.mode_recall(m, spoiled, 5.0, position=2.0, heading=0.3) == pytest.approx(1 / 3)
