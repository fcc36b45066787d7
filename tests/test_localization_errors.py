"""Errors of poses against arithmetic by hand and numpy, and summaries against counting."""

import json
import math

import numpy as np
import pytest
import torch

from mdps import Mixture
from mdps.localization import SPACE, errors

NORTH, EAST = math.pi / 2, 0.0


def poses(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("heading", "lateral", "longitudinal"),
    [
        (NORTH, 3.0, 4.0),
        (EAST, 4.0, 3.0),
        (-NORTH, 3.0, 4.0),
        (math.pi, 4.0, 3.0),
        (math.atan2(4, 3), 0.0, 5.0),  # the error lies along the heading
        (math.atan2(-3, 4), 5.0, 0.0),  # ... and across it
        (math.radians(30), abs(4 * math.cos(math.pi / 6) - 3 / 2), 3 * math.cos(math.pi / 6) + 4 / 2),
    ],
)
def test_lateral_is_across_and_longitudinal_along_the_true_heading(heading, lateral, longitudinal):
    """The estimate lies 3 m East and 4 m North of the truth, and its own heading does not matter."""
    got = errors.pose_errors(poses([10 + 3.0, -20 + 4.0, 1.234]), poses([10.0, -20.0, heading]))
    assert got.position.item() == pytest.approx(5)
    assert got.lateral.item() == pytest.approx(lateral, abs=1e-12)
    assert got.longitudinal.item() == pytest.approx(longitudinal, abs=1e-12)


@pytest.mark.parametrize(("a", "b", "degrees"), [(179, -179, 2), (-170, 170, 20), (0, 180, 180), (725, 5, 0), (-90, 45, 135)])
def test_angles_go_the_shorter_way_round(a, b, degrees):
    got = errors.pose_errors(poses([0, 0, math.radians(a)]), poses([0, 0, math.radians(b)]))
    assert math.degrees(got.angle.item()) == pytest.approx(degrees, abs=1e-9)


def candidates():
    """The truth is at the origin, heading East: the second is nearest, the first has the best angle and lateral error."""
    return poses([6.0, 0.5, 0.0], [0.0, 2.0, 1.0], [0.1, 9.0, 2.0]), poses([0.0, 0.0, 0.0])[0]


def test_best_jointly_and_per_axis():
    got = errors.best_jointly(*candidates())
    assert [e.item() for e in got] == pytest.approx([2.0, 1.0, 2.0, 0.0])
    got = errors.best_per_axis(*candidates())
    assert [e.item() for e in got] == pytest.approx([2.0, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("dead", [-math.inf, math.nan])
def test_candidates_that_there_are_not_never_count(dead):
    c, truth = candidates()
    alive = torch.tensor([-1.0, dead, -2.0])
    assert [e.item() for e in errors.best_jointly(c, truth, alive)] == pytest.approx([math.hypot(6, 0.5), 0, 0.5, 6])
    assert [e.item() for e in errors.best_per_axis(c, truth, alive)] == pytest.approx([math.hypot(6, 0.5), 0, 0.5, 0.1])
    c[0] = math.nan  # a pose that is none does not count either
    assert errors.best_jointly(c, truth, alive).lateral.item() == pytest.approx(9)
    for best in (errors.best_jointly, errors.best_per_axis):
        assert all(e == math.inf for e in best(c, truth, torch.full((3,), dead)))


def test_best_by_brute_force():
    g = torch.Generator().manual_seed(0)
    c, truth = 5 * torch.randn(4, 6, 3, 3, generator=g).double(), torch.randn(4, 6, 3, generator=g).double()
    log_densities = torch.randn(4, 6, 3, generator=g).double().masked_fill(torch.rand(4, 6, 3, generator=g) < 0.3, -math.inf)
    jointly, per_axis = (f(c, truth, log_densities) for f in (errors.best_jointly, errors.best_per_axis))
    for i in np.ndindex(4, 6):
        each = [errors.pose_errors(c[i][k], truth[i]) for k in range(3) if log_densities[i][k] > -math.inf]
        nearest = min(each, key=lambda e: e.position, default=[math.inf] * 4)
        smallest = [min(axis) for axis in zip(*each)] or [math.inf] * 4
        assert [e[i].item() for e in jointly] == pytest.approx([float(e) for e in nearest])
        assert [e[i].item() for e in per_axis] == pytest.approx([float(e) for e in smallest])


def test_recall_is_strict_and_counts_what_cannot_be_judged_as_wrong():
    assert errors.recall(torch.tensor([0.0, 1.0, 1.0, 2.5]), [0, 1, 1.5, 3]) == [0.0, 0.25, 0.75, 1.0]
    assert errors.recall(torch.tensor([[0.5, math.nan], [math.inf, 2.0]]), [1, 3, 1e30]) == [0.25, 0.5, 0.5]
    e = np.random.default_rng(0).exponential(3, 1000)
    assert errors.recall(torch.tensor(e), errors.METRES) == pytest.approx([(e < r).mean() for r in errors.METRES])
    with pytest.raises(ValueError, match="errors: expected at least one"):
        errors.recall(torch.zeros(0), [1])


def test_thresholds_are_the_papers():
    assert errors.METRES[:5] == (0, 0.1, 0.5, 1, 2) and errors.METRES[-1] == 30
    assert errors.DEGREES[:3] == (0, 1, 3) and errors.DEGREES[-1] == 89
    assert errors.RECALL_AT == (1, 3, 5)


def estimates(b=7, t=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    truth = 20 * torch.randn(b, t, 3, generator=g).double()
    c = truth[:, :, None] + torch.randn(b, t, 3, 3, generator=g).double() * torch.tensor([3.0, 3.0, 0.05])
    log_densities = torch.randn(b, t, 3, generator=g).double().sort(-1, descending=True).values
    counted = torch.rand(b, t, generator=g) < 0.7
    counted[:, 3] = False
    return errors.Estimates(c, log_densities, truth, counted, torch.rand(b, t, generator=g).double())


def test_summary_counts_what_it_should():
    given = estimates()
    rubbish = given.truth.masked_fill(~given.counted[..., None], math.nan)  # what is not counted may be anything
    got = errors.summarize(given._replace(truth=rubbish))
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    counted = given.counted.numpy()
    assert got["steps"] == counted.sum() and got["sequences"] == counted.any(1).sum()
    assert got["nll"] == pytest.approx(given.nll.numpy()[counted].mean(), abs=1e-5) and got["nll_infinite"] == 0
    first = errors.pose_errors(given.poses[:, :, 0], given.truth)
    three = [errors.pose_errors(given.poses[:, :, k], given.truth) for k in range(3)]
    for axis in errors.PoseErrors._fields:
        unit, curve = (180 / math.pi, errors.DEGREES) if axis == "angle" else (1, errors.METRES)
        e, best = getattr(first, axis).numpy() * unit, np.min([getattr(x, axis).numpy() for x in three], 0) * unit
        top = got["top_1"][axis]
        assert top["recall"] == pytest.approx([(e[counted] < r).mean() for r in (1, 3, 5)], abs=1e-5)
        assert top["curve"] == pytest.approx([(e[counted] < r).mean() for r in curve], abs=1e-5)
        assert top["median"] == pytest.approx(np.median(e[counted]), abs=1e-5)
        assert got["top_3_per_axis"][axis]["recall"] == pytest.approx([(best[counted] < r).mean() for r in (1, 3, 5)], abs=1e-5)
        for name, level in (("low", 0.25), ("median", 0.5), ("high", 0.75)):
            for t, value in enumerate(top["over_time"][name]):
                if t == 3:
                    assert value is None
                else:
                    assert value == pytest.approx(np.quantile(e[counted[:, t], t], level), abs=1e-5)
    jointly, per_axis = got["top_3_jointly"], got["top_3_per_axis"]
    assert jointly["position"] == per_axis["position"]
    assert all(a <= b for a, b in zip(jointly["lateral"]["curve"], per_axis["lateral"]["curve"]))


def test_summary_of_steps_without_an_answer():
    given = estimates()
    dead = given._replace(log_densities=torch.full_like(given.log_densities, -math.inf), nll=torch.full((7, 5), math.inf))
    got = json.loads(json.dumps(errors.summarize(dead), allow_nan=False))
    assert got["nll"] is None and got["nll_infinite"] == got["steps"]
    assert got["top_1"]["position"]["recall"] == [0, 0, 0] and got["top_1"]["position"]["median"] is None
    assert errors.summarize(given._replace(nll=None))["nll"] is None


def test_top_poses_are_those_of_suppression_on_a_fine_grid():
    """One broad mode along x: the highest place, then the highest of what is left 5 m beside it, and so on."""
    x = torch.linspace(-14.0, 14.0, 29, dtype=torch.float64)
    log_weights = (-((x - 1.2) ** 2) / (2 * 6.0**2)).log_softmax(0)
    means = torch.stack([x, torch.full_like(x, 2.0), torch.full_like(x, math.pi - 0.1)], -1)
    belief = Mixture(means, log_weights, torch.tensor([1.0, 1.0, 0.2], dtype=torch.float64), SPACE)
    poses, log_densities = errors.top_poses(belief, 3)
    assert belief.modes(3, errors.RADII)[1].tolist()[1:] == [-math.inf, -math.inf]  # the belief has one mode
    fine, left = np.arange(-20, 20, 0.001), np.ones(len(x), bool)
    for pose, log_density in zip(poses, log_densities):
        near = np.exp(-((fine[:, None] - x.numpy()[left]) ** 2) / 2) / math.sqrt(2 * math.pi)
        density = near @ log_weights.exp().numpy()[left]
        assert abs(pose[0] - fine[density.argmax()]) < 0.01 and pose[1] == pytest.approx(2.0)
        peak = torch.special.i0e(torch.tensor(25.0)).item()  # of the heading's kernel, and of that in y
        expected = math.log(density.max()) - 0.5 * math.log(2 * math.pi) - math.log(2 * math.pi * peak)
        assert float(log_density) == pytest.approx(expected, abs=1e-4)
        left &= abs(x.numpy() - float(pose[0])) >= 5.0


def test_top_poses_stop_where_nothing_is_left():
    means = torch.tensor([[[0.0, 0.0, 3.1], [1.0, 2.0, -3.1]], [[0.0, 0.0, 0.0], [4.0, 4.0, 0.6]]])
    belief = Mixture(means, torch.tensor([[0.8, 0.2], [0.6, 0.4]]).log(), torch.tensor([0.5, 0.5, 0.1]), SPACE)
    poses, log_densities = errors.top_poses(belief, 3)
    assert torch.isinf(log_densities).tolist() == [[False, True, True], [False, False, True]]
    torch.testing.assert_close(poses[0], means[0, :1].expand(3, 3), atol=0.02, rtol=0)
    torch.testing.assert_close(poses[1], means[1, [0, 1, 0]], atol=0.02, rtol=0)


def test_estimates_of_a_belief():
    """Two places a step, the second 10 m to the East; the truth is the lower one, and 0.3 rad off."""
    places = poses([0, 0, 0.0], [10, 0, NORTH]).expand(2, 4, 2, 3)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64).log().expand(2, 4, 2)
    belief = Mixture(places, weights, torch.tensor([1.0, 1.0, 0.2]).double(), SPACE)
    truth = poses([10, 0, NORTH + 0.3]).expand(2, 4, 3)
    counted = torch.tensor([[True] * 4, [True, True, False, False]])
    given = errors.estimates_of(belief, truth, counted)
    got = errors.summarize(given)
    assert got["steps"] == 6 and got["sequences"] == 2
    assert got["top_1"]["position"]["median"] == pytest.approx(10) and got["top_1"]["position"]["recall"] == [0, 0, 0]
    assert got["top_1"]["longitudinal"]["median"] == pytest.approx(10 * math.sin(0.3), abs=1e-4)
    assert got["top_3_jointly"]["position"]["recall"] == [1, 1, 1]
    assert got["top_3_jointly"]["angle"]["median"] == pytest.approx(math.degrees(0.3), abs=1e-3)
    kernel = math.exp(25 * math.cos(0.3) - 25) / (2 * math.pi * np.i0(25) * math.exp(-25))
    assert got["nll"] == pytest.approx(-math.log(0.3 * kernel / (2 * math.pi)), abs=1e-5)
    assert bool(errors.estimates_of(belief, truth).counted.all())


def test_chance_is_the_share_of_the_map():
    truth = torch.zeros(200, 100, 3)
    got = errors.summarize(errors.guesses(truth, 20.0, generator=torch.Generator().manual_seed(0)))
    assert got["top_1"]["position"]["recall"][2] == pytest.approx(math.pi * 25 / 400, abs=0.01)
    assert got["top_1"]["lateral"]["recall"][2] == pytest.approx(0.5, abs=0.01)
    assert got["top_1"]["angle"]["recall"][2] == pytest.approx(5 / 180, abs=0.005)
    assert got["top_3_per_axis"]["angle"]["recall"][2] == pytest.approx(1 - (1 - 5 / 180) ** 3, abs=0.008)
    assert got["nll"] == pytest.approx(math.log(400 * 2 * math.pi), abs=1e-4)


def test_batches_are_joined():
    whole = estimates()
    parts = [errors.Estimates(*(field[rows] for field in whole)) for rows in (slice(0, 3), slice(3, 7))]
    assert errors.summarize(errors.join(parts)) == errors.summarize(whole)
    assert errors.join([p._replace(nll=None) for p in parts]).nll is None
    for bad in ([], [parts[0], parts[1]._replace(nll=None)], [parts[0], estimates(2, 6)]):
        with pytest.raises(ValueError, match="parts: expected batches"):
            errors.join(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"poses": torch.zeros(7, 5, 3)}, "poses: expected shape"),
        ({"log_densities": torch.zeros(7, 5)}, r"log_densities: expected shape \(7, 5, 3\)"),
        ({"truth": torch.zeros(7, 5)}, r"truth: expected shape \(7, 5, 3\)"),
        ({"nll": torch.zeros(7)}, r"nll: expected shape \(7, 5\)"),
        ({"counted": torch.zeros(7, 5, dtype=torch.bool)}, "counted: expected bool, True at some step"),
        ({"truth": torch.full((7, 5, 3), math.nan)}, "truth: expected finite poses"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        errors.summarize(estimates()._replace(**change))
    with pytest.raises(ValueError, match="expected candidates"):
        errors.best_jointly(torch.zeros(3), torch.zeros(3))
