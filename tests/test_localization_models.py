"""Models, batches and starts of localization on maps: against brute force, closed forms and finite differences in float64."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from mdps.localization import (
    SPACE,
    BirdsEyeView,
    Encoders,
    EncoderSizes,
    Grid,
    MapLikelihood,
    MapSmoother,
    OdometryDynamics,
    align,
    anywhere,
    around,
    centred_map,
    make_scene,
    models,
    pose_loss,
    seeing,
    to_batch,
)

TINY = EncoderSizes(
    image_backbone=(8, 8),
    rays=True,
    latent=8,
    scale_bins=9,
    scale_range=(0.0, 8.0),
    grid=Grid(1.0, 8, 9),
    birds_eye_blocks=1,
    batch_norm=False,
    embedding=2,
    map_levels=((4, 1), (6, 1)),
    map_decoder=(4,),
    map_padding="zeros",
    map_stride=2,
    matching=4,
)


CELLS = Grid(0.5, 6, 7)


def random_scene(B, T, *, grid=CELLS, channels=3, side=24, dtype=torch.float32):
    """Features, confidence and visibility at random."""
    cells = (B, T, grid.depth, grid.width)
    views = BirdsEyeView(
        torch.randn(B, T, channels, grid.depth, grid.width, dtype=dtype),
        torch.rand(cells, dtype=dtype),
        torch.rand(cells) < 0.7,
    )
    return centred_map(torch.randn(B, channels, side, side + 2, dtype=dtype), 1 / grid.cell), views, grid


def random_poses(*shape, metres=4.0):
    return (2 * torch.rand(*shape, 3) - 1) * torch.tensor([metres, metres, math.pi])


def bilinear(image, column, row):
    """A pixel of (C, H, W) by hand; nothing lies around the image."""
    total = np.zeros(len(image))
    for c in (math.floor(column), math.floor(column) + 1):
        for r in (math.floor(row), math.floor(row) + 1):
            if 0 <= c < image.shape[2] and 0 <= r < image.shape[1]:
                total += image[:, r, c] * (1 - abs(column - c)) * (1 - abs(row - r))
    return total


def score_by_hand(map, views, b, t, pose, grid):
    """In metres: where each cell lies, and what the map has there."""
    x, y, heading = pose.double().tolist()
    features, first = map.features[b].double().numpy(), map.first[b].double().tolist()
    total, seen = 0.0, 0
    for i in range(grid.depth):
        for j in range(grid.width):
            if not views.valid[b, t, i, j]:
                continue
            ahead, right = (grid.depth - i) * grid.cell, (j - grid.width // 2) * grid.cell
            east = x + ahead * math.cos(heading) + right * math.sin(heading)
            north = y + ahead * math.sin(heading) - right * math.cos(heading)
            found = bilinear(features, (east - first[0]) * map.pixels_per_metre, (first[1] - north) * map.pixels_per_metre)
            cell = views.features[b, t, :, i, j].double().numpy() * float(views.confidence[b, t, i, j])
            total, seen = total + float(found @ cell), seen + 1
    return total / max(seen, 1)


# ---- Scenes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 3), (3, 2)])
def test_scores_are_those_of_brute_force(B, T):
    map, views, grid = random_scene(B, T)
    scene, poses = make_scene(map, views, grid), random_poses(B, T, 4, metres=7.0)  # some look beyond the map
    scores = scene.scores(poses.flatten(0, 1), scene.codes().flatten()).view(B, T, 4)
    torch.testing.assert_close(scores, align(map, views, poses, grid))
    want = [[[score_by_hand(map, views, b, t, p, grid) for p in poses[b, t]] for t in range(T)] for b in range(B)]
    torch.testing.assert_close(scores.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_codes_name_views_in_any_order():
    map, views, grid = random_scene(2, 3)
    scene, poses = make_scene(map, views, grid), random_poses(5, 2)
    assert scene.codes().tolist() == [[1, 2, 3], [4, 5, 6]]
    codes = torch.tensor([6, 0, 1, 4, 0])
    scores = scene.scores(poses, codes)
    for row, code in enumerate(codes.tolist()):
        b, t = divmod(code - 1, 3)
        want = [score_by_hand(map, views, b, t, p, grid) for p in poses[row]] if code else [0.0, 0.0]
        torch.testing.assert_close(scores[row].tolist(), want, rtol=1e-4, atol=1e-5)


def test_a_view_of_nothing_scores_0():
    map, views, grid = random_scene(1, 2)
    views.valid[0, 1] = False
    scene = make_scene(map, views, grid)
    scores = scene.scores(random_poses(2, 3), scene.codes()[0])
    assert (scores[0] != 0).all() and (scores[1] == 0).all()


def test_scores_of_several_cameras_add_up():
    """Each camera's view by hand, at the pose that it has: ahead and to the left of the vehicle, and turned to the left."""
    B, T, V, N = 2, 2, 3, 4
    map, views, grid = random_scene(B, T * V)
    views.valid[1, 2] = False  # one camera of one step sees nothing
    mounts = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.5, math.pi / 2], [-1.0, 0.25, 2.5]])
    of_cameras = BirdsEyeView(*(x.unflatten(1, (T, V)) for x in views))
    scene, poses = make_scene(map, of_cameras, grid, mounts), random_poses(B, T, N)
    scores = scene.scores(poses.flatten(0, 1), scene.codes().flatten()).view(B, T, N)
    for b in range(B):
        for t in range(T):
            for n in range(N):
                x, y, heading = poses[b, t, n].tolist()
                want = 0.0
                for v, (ahead, left, turn) in enumerate(mounts.tolist()):
                    east = x + ahead * math.cos(heading) + left * math.cos(heading + math.pi / 2)
                    north = y + ahead * math.sin(heading) + left * math.sin(heading + math.pi / 2)
                    at = torch.tensor([east, north, heading + turn])
                    want += score_by_hand(map, views, b, t * V + v, at, grid)
                assert scores[b, t, n].item() == pytest.approx(want, abs=1e-4)
    with pytest.raises(ValueError, match="V = 2, of mounts, with B = 2, that of the maps, got"):
        make_scene(map, of_cameras, grid, mounts[:2])


def test_a_smoother_with_several_cameras():
    """Of two cameras of which one sees nothing, beliefs and gradients are those of the other alone."""
    torch.manual_seed(0)
    model = MapSmoother(Encoders(TINY), 6)
    images = torch.randint(0, 256, (1, 3, 2, 3, 16, 16), dtype=torch.uint8)
    camera = torch.tensor([8.0, 8.0, 7.5, 7.5]).expand(1, 3, 2, 4)
    classes = torch.randint(0, 7, (1, 3, 32, 32), dtype=torch.uint8)
    mounts = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, math.pi / 2]])
    both = model.observe(images, camera, classes, 2.0, mounts=mounts)
    first = model.observe(images[:, :, 0], camera[:, :, 0], classes, 2.0)
    blind = both._replace(views=both.views._replace(valid=both.views.valid.clone()))
    blind.views.valid[:, :, 1] = False
    particles = random_poses(1, 9, metres=5.0), random_poses(1, 8, metres=5.0), torch.zeros(1, 3, 3)
    beliefs = [model(scene, *particles, seed=torch.tensor(1)).smoothed for scene in (blind, first, both)]
    torch.testing.assert_close(beliefs[0].log_weights, beliefs[1].log_weights, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(beliefs[2].log_weights, beliefs[1].log_weights, atol=1e-3)
    with pytest.raises(ValueError, match=r"images, camera: expected \(B, T, V, ...\) with V = 2"):
        model.observe(images[:, :, 0], camera[:, :, 0], classes, 2.0, mounts=mounts)


def test_what_a_scene_refuses():
    map, views, grid = random_scene(2, 3)
    with pytest.raises(ValueError, match=r"views: expected features of shape \(B, T, C, depth, width\) with B = 2"):
        make_scene(map, BirdsEyeView(*(x[:1] for x in views)), grid)
    with pytest.raises(ValueError, match=r"grid: expected cells of 0.5 m, pixels of the map, got 1.0 m"):
        make_scene(map, views, grid._replace(cell=1.0))


def test_a_scene_is_seen_inside_of_seeing_alone():
    scenes = [make_scene(*random_scene(1, 1)) for _ in range(2)]
    first, second, poses, code = MapLikelihood(3.0), MapLikelihood(2.0), random_poses(1, 4), torch.tensor([1])
    for scene in scenes:
        with seeing(scene, first, second):
            torch.testing.assert_close(first(poses, code), 3 * scene.scores(poses, code))
            torch.testing.assert_close(second(poses, code), 2 * scene.scores(poses, code))
    with pytest.raises(RuntimeError, match=r"there is no scene: call the filter within `with seeing"):
        first(poses, code)
    with pytest.raises(KeyError), seeing(scenes[0], first):
        raise KeyError
    assert first.scene is None
    with seeing(scenes[0], first), pytest.raises(RuntimeError, match="there is no scene"):
        second(poses, code)


# ---- Batches and starts -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Sequences of a small scene, with noisy odometry and without."""
    small_scenes = pytest.importorskip("small_scenes")
    from mdps.datasets import ImageFormat, OdometryNoise, SequenceDataset, mapillary
    from mdps.datasets.sequences import runs

    root = tmp_path_factory.mktemp("mapillary")
    small_scenes.make_mapillary(root)
    scene = mapillary.read_scene(root / "berlin")
    noises = OdometryNoise(5.0, 15.0), OdometryNoise(0.0, 0.0)
    options = {"image": ImageFormat(32, 32), "crop_metres": 256.0}
    return [SequenceDataset(runs(scene, 6), {scene.name: scene.map}, noise=noise, **options) for noise in noises]


def middle_of(item):
    """Where the crop's middle lies, in metres of the map."""
    half = torch.tensor([item["map"].size(-1) - 1, 1 - item["map"].size(-2)], dtype=torch.float64) / 2
    return item["map_origin"] + half / item["pixels_per_metre"]


def test_a_batch_is_its_items_in_metres(datasets):
    noisy, _ = datasets
    items = [noisy[0], noisy[4, 3], noisy[6, 1]]
    batch = to_batch(default_collate(items))
    assert batch.pixels_per_metre == 2.0
    for b, item in enumerate(items):
        torch.testing.assert_close(
            batch.poses[b, :, :2].double() + middle_of(item), item["pose"][:, :2].double(), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(batch.poses[b, :, 2], item["pose"][:, 2], atol=1e-5, rtol=0)
        for action, (u, v, turn) in zip(batch.actions[b, 1:].tolist(), item["odometry"].tolist()):
            assert action == pytest.approx([u / 2, -v / 2, -turn], abs=1e-6)  # rows point South, angles run clockwise
        assert (batch.actions[b, 0] == 0).all()
        for name, value in (
            ("image", batch.images),
            ("camera", batch.camera),
            ("map", batch.classes),
            ("observed", batch.observed),
        ):
            assert torch.equal(value[b], item[name])
    alone = to_batch(items[1])
    for whole, one in zip(batch, alone):
        assert torch.equal(whole[1:2], one) if isinstance(one, torch.Tensor) else whole == one


def test_actions_without_noise_are_steps(datasets):
    _, exact = datasets
    for i in range(0, len(exact), 3):
        batch = to_batch(exact[i, 1])
        steps = exact[i, 1]["pose"].diff(dim=0)
        torch.testing.assert_close(batch.actions[0, 1:], SPACE.wrap(steps), atol=1e-4, rtol=0)
        assert (steps[:, :2].norm(dim=-1) > 1).any()
        moved = batch.poses[:, :-1] + batch.actions[:, 1:]
        torch.testing.assert_close(SPACE.difference(moved, batch.poses[:, 1:]), torch.zeros_like(moved), atol=1e-4, rtol=0)


def test_a_batch_has_one_resolution(datasets):
    items = default_collate([datasets[0][0], datasets[0][1]])
    items["pixels_per_metre"] = torch.tensor([2.0, 4.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"pixels_per_metre: expected one resolution in a batch, got \[2.0, 4.0\]"):
        to_batch(items)


@pytest.mark.parametrize("kappa", [0.5, 4.0, 100.0])
def test_statistics_of_particles_around_a_pose(kappa):
    n, metres, pose = 20000, 50.0, torch.tensor([[100.0, -20.0, 3.0]])
    particles = around(pose, n, metres, kappa, torch.tensor(6)).double()[0]
    assert particles.shape == (n, 3) and (particles[:, 2] >= -math.pi).all() and (particles[:, 2] < math.pi).all()
    apart = (particles - pose.double()).T.numpy()
    for values in apart[:2]:
        assert abs(values.mean()) < 4 * metres / n**0.5
        assert abs(values.std() - metres) < 4 * metres / (2 * n) ** 0.5
        assert scipy.stats.kstest(values, scipy.stats.norm(scale=metres).cdf).pvalue > 0.01
    assert abs(np.corrcoef(apart)[np.triu_indices(3, 1)]).max() < 4 / n**0.5
    law = scipy.stats.vonmises(kappa)
    length = scipy.special.ive(1, kappa) / scipy.special.ive(0, kappa)
    assert abs(np.cos(apart[2]).mean() - length) < 4 * (law.expect(lambda a: (np.cos(a) - length) ** 2) / n) ** 0.5
    assert abs(np.sin(apart[2]).mean()) < 4 * (law.expect(lambda a: np.sin(a) ** 2) / n) ** 0.5
    assert scipy.stats.kstest((apart[2] + math.pi) % (2 * math.pi) - math.pi, law.cdf).pvalue > 0.01


def test_statistics_of_particles_anywhere():
    n, size = 20000, (300.0, 120.0)
    particles = anywhere(1, n, size, torch.tensor(5)).double()[0].T.numpy()
    for values, width in zip(particles, (*size, 2 * math.pi)):
        assert abs(values.mean()) < 4 * width / (12 * n) ** 0.5
        assert scipy.stats.kstest(values, scipy.stats.uniform(-width / 2, width).cdf).pvalue > 0.01
    assert abs(np.corrcoef(particles)[np.triu_indices(3, 1)]).max() < 4 / n**0.5


def test_starts_of_a_row_depend_on_its_seed_alone():
    poses, seeds = random_poses(3), torch.tensor([5, 8, 5])
    together, places = around(poses, 9, 10.0, 4.0, seeds), anywhere(3, 9, (40.0, 30.0), seeds)
    for b in range(3):
        assert torch.equal(together[b : b + 1], around(poses[b : b + 1], 9, 10.0, 4.0, seeds[b : b + 1]))
        assert torch.equal(places[b : b + 1], anywhere(1, 9, (40.0, 30.0), seeds[b : b + 1]))
    assert torch.equal(places[0], places[2]) and not (places[0] == places[1]).any()
    shared = around(poses[:1].expand(2, 3), 9, 10.0, 4.0, torch.tensor(1))
    assert not (shared[0] == shared[1]).any()


def test_starts_that_are_refused():
    poses, seed = random_poses(3), torch.tensor(1)
    for call, error, words in [
        (lambda: around(poses[0], 9, 10.0, 4.0, seed), ValueError, r"poses: expected float \(B, 3\), got torch.float32 \(3,\)"),
        (lambda: around(poses.long(), 9, 10.0, 4.0, seed), ValueError, "poses: expected float .*, got torch.int64"),
        (lambda: around(poses, 0, 10.0, 4.0, seed), ValueError, "n: expected at least 1, got 0"),
        (lambda: around(poses, 2.5, 10.0, 4.0, seed), TypeError, "n: expected an int, got 2.5"),
        (lambda: around(poses, 9, -1.0, 4.0, seed), ValueError, "metres: expected at least 0, got -1.0"),
        (lambda: around(poses, 9, 10.0, math.nan, seed), ValueError, "concentration: expected at least 0, got nan"),
        (lambda: around(poses, 9, 10.0, 4.0, torch.tensor([1, 2])), ValueError, r"seed: expected shape .*, got \(2,\)"),
        (lambda: around(poses, 9, 10.0, 4.0, 1), TypeError, "seed: expected an int64 tensor"),
        (lambda: anywhere(0, 9, (4.0, 3.0), seed), ValueError, "batch: expected at least 1, got 0"),
        (lambda: anywhere(3, 0, (4.0, 3.0), seed), ValueError, "n: expected at least 1, got 0"),
        (lambda: anywhere(3, 9, (4.0,), seed), ValueError, "size: expected 2 finite numbers"),
        (lambda: anywhere(3, 9, (4.0, -3.0), seed), ValueError, "size: expected at least 0, got -3.0"),
        (lambda: anywhere(3, 9, (4.0, 3.0), torch.tensor([1, 2])), ValueError, r"seed: expected shape \(\) or \(3,\)"),
    ]:
        with pytest.raises(error, match=words):
            call()


# ---- Dynamics -----------------------------------------------------------------------------------------------------------


def without_residual(dynamics):
    with torch.no_grad():
        dynamics.network.second[-2].weight.zero_()
    return dynamics


def test_odometry_without_a_residual_is_a_sum():
    spread = torch.tensor([1.5, 0.5, 0.2])
    forward, reverse = (without_residual(OdometryDynamics(spread.tolist(), reverse=reverse)) for reverse in (False, True))
    particles, noise, action = (
        random_poses(3, 5),
        torch.randn(3, 5, 4),
        torch.tensor([[5.0, -2.0, 0.3], [0.0, 0.0, 0.0], [9.0, 1.0, -2.0]]),
    )
    want = particles.double() + action.double()[:, None] + spread.double() * noise[..., :3].double()
    torch.testing.assert_close(forward(particles, noise, action).double(), want, rtol=0, atol=1e-5)
    still = torch.zeros(3, 5, 4)
    there = forward(particles, still, action)
    assert torch.equal(there, particles + action[:, None])
    torch.testing.assert_close(reverse(there, still, action), particles, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"action: expected odometry \(B, 3\), got None"):
        forward(particles, noise)


def test_the_residual_is_the_network_of_heading_action_and_noise():
    dynamics = OdometryDynamics(scale=(3.0, 4.0, 0.5)).double()
    with torch.no_grad():
        for p in dynamics.network.parameters():
            p.copy_(torch.randn_like(p))
    particles, noise, action = random_poses(2, 6).double(), torch.randn(2, 6, 4).double(), torch.randn(2, 3).double()
    moved = dynamics(particles, noise, action)
    direction = torch.stack([particles[..., 2].sin(), particles[..., 2].cos()], -1)
    condition = (action / torch.tensor([5.0, 5.0, 0.25])).unsqueeze(1).expand(2, 6, 3)
    network = dynamics.network
    y = network.second(torch.cat([network.first(direction), noise, condition], -1))
    plain = particles + action[:, None] + dynamics.log_spread.exp() * noise[..., :3]
    torch.testing.assert_close(moved, plain + torch.tensor([3.0, 4.0, 0.5], dtype=torch.float64) * (2 * y - 1))
    away = particles + torch.tensor([100.0, -30.0, 0.0], dtype=torch.float64)  # the motion is the same everywhere
    torch.testing.assert_close(dynamics(away, noise, action) - away, moved - particles)


# ---- What encoders learn from single images -----------------------------------------------------------------------------


class Spied:
    """A scene that remembers at which poses it was asked."""

    def __init__(self, scene):
        self.scene, self.codes = scene, scene.codes

    def scores(self, poses, codes):
        self.poses = poses
        return self.scene.scores(poses, codes)


def test_pose_loss_is_a_softmax_over_poses():
    map, views, grid = random_scene(2, 2)
    truth, n, side = random_poses(2, 2), 12, 10.0
    scene = Spied(make_scene(map, views, grid))
    log_temperatures = torch.tensor([0.5, 2.0])
    loss = pose_loss(scene, truth, n, log_temperatures, side, torch.tensor(3))
    poses = scene.poses.view(2, 2, n + 1, 3)
    apart = (poses - truth[:, :, None]).abs()
    assert (apart[:, :, 0] < 5 * torch.tensor(models.NEAR)).all() and (apart[:, :, 0] > 0).all()
    assert (poses[:, :, 1 : 1 + n // 2].abs() <= torch.tensor([side / 2 + 32, side / 2 + 32, math.pi])).all()
    assert (apart[:, :, 1 + n // 2 :] <= torch.tensor([16.0, 16.0, math.pi]) + 1e-5).all()
    for b in range(2):
        for t in range(2):
            scores = np.array([score_by_hand(map, views, b, t, p, grid) for p in poses[b, t]])
            each = [scipy.special.logsumexp(f * scores) - f * scores[0] for f in np.exp([0.5, 2.0])]
            assert loss[b, t].item() == pytest.approx(np.mean(each), abs=1e-4)


@pytest.mark.parametrize("n", [1, 4, 5, 30])
def test_pose_loss_looks_near_and_far(n):
    scene, truth, side = Spied(make_scene(*random_scene(1, 1))), torch.zeros(1, 1, 3), 10000.0
    first, n_far = [], 0
    for seed in range(200):
        pose_loss(scene, truth, n, torch.tensor(0.0), side, torch.tensor(seed))
        first.append(scene.poses[0, 0])
        n_far += (scene.poses[0, 1:, :2].abs().amax(-1) > 16).sum().item()
    assert n_far == pytest.approx(200 * ((n + 1) // 2), abs=2)
    spread = torch.stack(first).std(0)
    assert ((spread / torch.tensor(models.NEAR)).log().abs() < 4 / math.sqrt(400)).all()


def test_pose_loss_of_equal_poses():
    map, views, grid = random_scene(2, 3)
    views = views._replace(features=torch.zeros_like(views.features))
    loss = pose_loss(make_scene(map, views, grid), random_poses(2, 3), 20, torch.tensor(1.0), 10.0, torch.tensor(0))
    torch.testing.assert_close(loss, torch.full((2, 3), math.log(21)))


def test_arguments_that_pose_loss_refuses():
    scene, truth = make_scene(*random_scene(2, 3)), random_poses(2, 3)
    good = {"truth": truth, "n": 4, "log_temperature": torch.tensor(1.0), "side": 10.0, "seed": torch.tensor(0)}
    for change, error, words in [
        ({"truth": truth[:, 1:]}, ValueError, r"truth: expected shape \(2, 3, 3\), .*, got \(2, 2, 3\)"),
        ({"n": 0}, ValueError, "n: expected at least 1, got 0"),
        ({"n": 1.5}, TypeError, "n: expected an int, got 1.5"),
        ({"log_temperature": torch.zeros(1, 1)}, ValueError, r"log_temperature: expected shape \(\) or \(H,\), got \(1, 1\)"),
        ({"side": -1.0}, ValueError, "side: expected at least 0, got -1.0"),
        ({"side": math.inf}, ValueError, "side: expected at least 0, got inf"),
        ({"first": -1}, ValueError, "first: expected at least 0, got -1"),
        ({"seed": 3}, TypeError, "seed: expected an int64 tensor"),
    ]:
        with pytest.raises(error, match=words):
            pose_loss(scene, **(good | change))


def test_gradients_of_pose_loss():
    map, views, grid = random_scene(1, 2, dtype=torch.float64, channels=2, side=16)
    truth, log_temperature = random_poses(1, 2, metres=2.0).double(), torch.tensor([0.3, 1.0], dtype=torch.float64)

    def loss(features, seen, confidence, truth, log_temperature):
        scene = make_scene(map._replace(features=features), BirdsEyeView(seen, confidence, views.valid), grid)
        return pose_loss(scene, truth, 8, log_temperature, 8.0, torch.tensor(1))

    args = map.features, views.features, views.confidence, truth, log_temperature
    for wrt in range(len(args)):
        given = [x.clone().requires_grad_(i == wrt) for i, x in enumerate(args)]
        assert torch.autograd.gradcheck(loss, given, fast_mode=True, eps=1e-6, atol=1e-6)
        (grad,) = torch.autograd.grad(loss(*given).sum(), given[wrt])
        assert (grad != 0).any()


# ---- Filters and the smoother on a made map -----------------------------------------------------------------------------


def made_features(B, channels, side):
    """A neural map at random, coarse and fine: (B, channels, side, side), of norm 1, every place unlike any other."""
    levels = [
        F.interpolate(torch.randn(B, channels, side // k, side // k), size=(side, side), mode="bicubic") for k in (4, 10, 40)
    ]
    return F.normalize(sum(levels), dim=1).contiguous(memory_format=torch.channels_last)


def cut_views(map, poses, grid):
    """What perfect encoders see at poses (B, T, 3): the map itself, sampled by `grid_sample` where the cells lie."""
    ahead = (torch.arange(grid.depth, 0, -1) * grid.cell)[:, None]
    right = ((torch.arange(grid.width) - grid.width // 2) * grid.cell)[None]
    x, y, heading = (p[..., None, None] for p in poses.unbind(-1))
    east, north = x + ahead * heading.cos() + right * heading.sin(), y + ahead * heading.sin() - right * heading.cos()
    half = map.features.size(-1) / map.pixels_per_metre / 2
    where = torch.stack([east / half, -north / half], -1)
    views = [F.grid_sample(map.features, where[:, t], align_corners=False) for t in range(poses.size(1))]
    features = torch.stack(views, 1)
    ones = torch.ones_like(features[:, :, 0])
    return BirdsEyeView(features, ones, ones.bool())


def tracks(B, T):
    """Poses of drives with 5 m a step that turn slowly, and their odometry with errors of up to 1 m and 0.1 rad."""
    heading = 2 * math.pi * torch.rand(B, 1) + 0.2 * torch.randn(B, T).cumsum(1)
    steps = 5 * torch.stack([heading.cos(), heading.sin()], -1)
    poses = SPACE.wrap(torch.cat([steps.cumsum(1) - 3 * steps[:, :1] * T / 5, heading.unsqueeze(-1)], -1))
    actions = torch.zeros(B, T, 3)
    actions[:, 1:] = SPACE.difference(poses[:, 1:], poses[:, :-1]) + (2 * torch.rand(B, T - 1, 3) - 1) * torch.tensor(
        [1.0, 1.0, 0.1]
    )
    return poses, actions


def true_likelihood(likelihood, offset):
    """Make the smoother's network log l = temperature * score + log m_f + log m_b - offset, by weights set by hand."""
    with torch.no_grad():
        for p in likelihood.network.parameters():
            p.zero_()
        layers = list(likelihood.network)
        for layer in layers[1::2]:
            layer.weight.fill_(1.0)  # PReLU that lets everything pass
        layers[0].weight[0] = torch.tensor([1.0, 5.0, 5.0])
        for layer in layers[2::2]:
            layer.weight[0, 0] = 1.0
        layers[-1].bias.fill_(-offset)


TEMPERATURE = 20.0


def perfect_smoother(n):
    """Without anything to learn: exact odometry, measurements by score alone, narrow kernels, and log l as it should be."""
    model = MapSmoother(Encoders(TINY), n).requires_grad_(False)
    smoother = model.smoother
    for f in (smoother.forward_filter, smoother.backward_filter):
        without_residual(f.dynamics).log_spread.copy_(torch.tensor([1.0, 1.0, 0.1]).log())
        for kernel, width in ((f.posterior_bandwidth, 1.0), (f.resampling_bandwidth, 0.5)):
            kernel.log_excess.copy_((width * torch.tensor([1.0, 1.0, 0.1]) - kernel.minimum).log())
    for likelihood in (smoother.forward_filter.likelihood, smoother.backward_filter.likelihood, smoother.likelihood):
        likelihood.log_temperature.fill_(math.log(TEMPERATURE))
    true_likelihood(smoother.likelihood, TEMPERATURE)  # scores of features of norm 1 are at most 1
    return model


def test_perfect_features_lead_to_the_true_pose(monkeypatch):
    # With weights of at least 1e-4 the ends, where q is broad, would belong to its lone particles: their 1 / q is large.
    monkeypatch.setattr(models, "MINIMUM_WEIGHT", 1e-12)
    grid = Grid(1.0, 16, 33)
    map, (poses, actions) = centred_map(made_features(3, 6, 200), 1.0), tracks(3, 8)
    scene = make_scene(map, cut_views(map, poses, grid), grid)
    at_truth = scene.scores(poses.flatten(0, 1).unsqueeze(1), scene.codes().flatten())
    elsewhere = scene.scores(random_poses(24, 200, metres=60.0), scene.codes().flatten())
    assert (at_truth > 0.9).all() and (elsewhere < at_truth).all()
    initial, final = (around(poses[:, t], 2000, 15.0, 10.0, torch.tensor(t + 1)) for t in (0, -1))
    beliefs = perfect_smoother(400)(scene, initial, final, actions, seed=torch.tensor(3))

    def errors(belief):
        modes, _ = belief.modes(1, (5.0, 5.0, 0.5))
        gap = SPACE.difference(modes[..., 0, :], poses)
        return gap[..., :2].norm(dim=-1), gap[..., 2].abs()

    (forward, _), (backward, _) = errors(beliefs.forward.posterior), errors(beliefs.backward.posterior)
    smoothed, turned = errors(beliefs.smoothed)
    assert forward[:, 2:].max() < 1 and backward[:, :-2].max() < 1  # at their starts both have few particles nearby
    assert smoothed.max() < 1 and turned.max() < 0.1
    collapsed = beliefs.forward.collapsed | beliefs.backward.collapsed | beliefs.collapsed
    assert not collapsed.any()


def tiny_problem(B=2, T=3, n=6):
    torch.manual_seed(1)
    model = MapSmoother(Encoders(TINY), n)
    images, camera = (
        torch.randint(0, 256, (B, T, 3, 16, 16), dtype=torch.uint8),
        torch.tensor([16.0, 16.0, 7.5, 7.5]).expand(B, T, 4),
    )
    classes = torch.stack([torch.randint(0, k, (B, 40, 40)) for k in (8, 11, 34)], 1).to(torch.uint8)
    poses, actions = random_poses(B, T), torch.randn(B, T, 3)
    starts = [around(poses[:, t], 2 * n, 3.0, 4.0, torch.tensor(t + 5)) for t in (0, T - 1)]
    return model, (images, camera, classes, 2.0), starts, actions, poses


def test_missing_frames_say_nothing():
    model, seen, starts, actions, poses = tiny_problem()
    observed = torch.tensor([[False, True, False], [True, False, True]])
    beliefs = model(model.observe(*seen), *starts, actions, observed, torch.tensor(2))
    for filter in (beliefs.forward, beliefs.backward):
        for b, t in observed.logical_not().nonzero().tolist():
            assert torch.equal(filter.posterior.log_weights[b, t], filter.predicted.log_weights[b, t])
        for b, t in observed.nonzero().tolist():
            assert not torch.equal(filter.posterior.log_weights[b, t], filter.predicted.log_weights[b, t])
        assert filter.posterior.means.isfinite().all() and not filter.posterior.log_weights.isnan().any()
    assert beliefs.smoothed.log_weights.isfinite().all()
    loss = beliefs.smoothed.log_prob(poses).sum() + beliefs.forward.posterior.log_prob(poses).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert loss.isfinite() and all(g.isfinite().all() for g in grads if g is not None)
    images = seen[0].clone()
    images[~observed] = 0  # what they show does not matter
    other = model(model.observe(images, *seen[1:]), *starts, actions, observed, torch.tensor(2))
    torch.testing.assert_close(other.smoothed.log_weights, beliefs.smoothed.log_weights)
    torch.testing.assert_close(other.forward.posterior.log_weights, beliefs.forward.posterior.log_weights)


def test_the_loss_reaches_every_parameter():
    model, seen, starts, actions, poses = tiny_problem(T=4)
    beliefs = model(model.observe(*seen), *starts, actions, seed=torch.tensor(2))
    (-beliefs.smoothed.log_prob(poses).mean()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        # a scale's bias is the same for all rows of a column, whose softmax does not see it
        assert (p.grad != 0).any() or name.endswith("scales.bias"), name


def test_views_encoded_in_pieces_are_the_same():
    model, seen, _, _, _ = tiny_problem()
    whole, pieces = model.observe(*seen), model.observe(*seen, chunk=4)
    torch.testing.assert_close(pieces.views.features, whole.views.features)
    assert torch.equal(pieces.views.valid, whole.views.valid)


def kept_numbers(n, grid):
    """How many numbers autograd keeps for the loss of both filters and the smoother, n particles each."""
    map, views, _ = random_scene(1, 2, grid=grid, channels=2)
    model = MapSmoother(Encoders(TINY), n)
    poses, kept = random_poses(1, 2), {}
    starts = [around(poses[:, t], n, 3.0, 4.0, torch.tensor(t)) for t in (0, 1)]
    views = views._replace(features=views.features.requires_grad_())

    def keep(x):
        kept[x.untyped_storage().data_ptr(), x.storage_offset(), x.shape] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        beliefs = model(make_scene(map, views, grid), *starts, torch.randn(1, 2, 3), seed=torch.tensor(0))
        loss = beliefs.smoothed.log_prob(poses).sum()
    loss.backward()
    return sum(x.numel() for x in kept.values())


def test_memory_does_not_grow_with_particles_times_cells():
    few, many = (32, 64)
    small, large = Grid(0.5, 5, 7), Grid(0.5, 20, 21)
    grown = (kept_numbers(many, large) - kept_numbers(few, large)) - (kept_numbers(many, small) - kept_numbers(few, small))
    assert grown == 0
