"""Retrieval against loops, and as a particle filter's likelihood."""

import math

import pytest
import torch
from torch import nn

import mdps
from mdps.localization import SPACE, MapFeatures, centred_map
from mdps.localization.retrieval import GaussianDynamics, Retrieval, RetrievalLikelihood

F64 = torch.float64


def network(n_rotations=256, stride=2):
    map_trunk = nn.Conv2d(3, 6, stride, stride=stride)
    image_trunk = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.ReLU())
    return Retrieval(map_trunk, image_trunk, 6, 5, n_rotations).to(F64)


def vectors(B=2, height=9, width=7, seed=0):
    """A map of unit vectors, and images' unit vectors."""
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(B, 4, 16, height, width, generator=g, dtype=F64)
    codes = torch.randn(B, 16, generator=g, dtype=F64)
    map = centred_map((features / features.norm(dim=2, keepdim=True)).flatten(1, 2), 2.0)
    return map, codes / codes.norm(dim=-1, keepdim=True)


def logit(map, codes, b, direction, v, u):
    """32 times the cosine, by a loop."""
    at = map.features[b, :, v, u].tolist()
    return 32 * sum(x * y for x, y in zip(at[16 * direction : 16 * direction + 16], codes[b].tolist()))


def hat(x):
    return max(0.0, 1 - abs(x))


def by_hats(map, codes, b, pose):
    """Bilinear in position, linear around the circle of directions, nothing outside of the map."""
    x, y = map.first[b].tolist()
    u, v, d = (pose[0] - x) * 2, (y - pose[1]) * 2, pose[2] / (math.pi / 2)
    total = 0.0
    for direction in range(4):
        for row in range(map.features.size(-2)):
            for column in range(map.features.size(-1)):
                weight = hat((d - direction + 2) % 4 - 2) * hat(v - row) * hat(u - column)
                total += weight * logit(map, codes, b, direction, row, column) if weight else 0.0
    return total


def test_encoders_give_unit_vectors_in_the_frame_of_the_map():
    net = network()
    map = net.encode_map(torch.randint(0, 5, (2, 3, 12, 8)).to(F64), 2.0)
    assert map.features.shape == (2, 64, 6, 4) and map.pixels_per_metre == 1.0
    # The middle of the first large pixel is that of four small ones; the map is 4 m wide and 6 m high.
    assert map.first.tolist() == [[-1.5, 2.5]] * 2
    torch.testing.assert_close(map.features.unflatten(1, (4, 16)).norm(dim=2), torch.ones(2, 4, 6, 4, dtype=F64))
    images = torch.randn(2, 3, 3, 20, 16, dtype=F64)
    codes = net.encode_images(images)
    assert codes.shape == (2, 3, 16)
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(2, 3, dtype=F64))
    torch.testing.assert_close(codes[1, 2], net.encode_images(images[1, 2:])[0])
    torch.testing.assert_close(net.encode_images(images, chunk=4), codes)
    none = net.encode_images(images[:0])
    assert none.shape == (0, 3, 16)
    none.sum().backward()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_average_of_activations_is_that_of_a_convolution(memory):
    head = network().image_head[0]
    x = torch.randn(3, head.in_features, 5, 4, dtype=F64).contiguous(memory_format=memory).requires_grad_()
    parameters = x, head.weight, head.bias
    by_pixels = nn.functional.conv2d(x, head.weight[..., None, None], head.bias).relu().mean((-2, -1))
    weights = torch.randn(by_pixels.shape, dtype=F64)
    torch.testing.assert_close(head(x), by_pixels)
    for a, b in zip(
        torch.autograd.grad((head(x) * weights).sum(), parameters), torch.autograd.grad((by_pixels * weights).sum(), parameters)
    ):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert network().float().image_head[0](x.detach().bfloat16()).dtype == torch.float32


def test_volume_at_the_four_directions_is_32_cosines():
    map, codes = vectors()
    volume = network(8).volume(map, codes)
    assert volume.shape == (2, 8, 9, 7)
    for b, d, v, u in [(0, 0, 0, 0), (0, 3, 8, 2), (1, 1, 4, 6), (1, 2, 7, 3)]:
        assert float(volume[b, 2 * d, v, u]) == pytest.approx(logit(map, codes, b, d, v, u))


def test_half_types_and_autocast_are_computed_in_float32():
    map, codes = vectors()
    low = map._replace(features=map.features.bfloat16()), codes.bfloat16()
    expected = network(4).volume(low[0]._replace(features=low[0].features.double()), low[1].double()).float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(network(4).volume(*low), expected, rtol=0, atol=1e-4)


def test_headings_between_directions_are_interpolated_around_the_circle():
    map, codes = vectors()
    volume = network(256).volume(map, codes)
    four = network(4).volume(map, codes)
    for k in (0, 1, 63, 64, 100, 191, 192, 193, 224, 255):
        low, share = divmod(k / 64, 1)
        expected = (1 - share) * four[:, int(low)] + share * four[:, (int(low) + 1) % 4]
        torch.testing.assert_close(volume[:, k], expected)


def test_search_is_suppression_in_the_whole_volume(monkeypatch):
    monkeypatch.setattr("mdps.localization.retrieval._CHUNK_BYTES", 5000)
    map, codes = vectors(height=25, width=22)
    net = network(48)
    volume = net.volume(map, codes)
    result = net.search(map, codes, 4)
    torch.testing.assert_close(result.log_normalizer, volume.flatten(1).exp().sum(-1).log())
    k, v, u = torch.meshgrid(torch.arange(48), torch.arange(25), torch.arange(22), indexing="ij")
    for b in range(2):
        rest = volume[b].clone()
        for pose, log_prob in zip(result.poses[b].tolist(), result.log_probs[b]):
            a = [int(x.flatten()[rest.flatten().argmax()]) for x in (k, v, u)]
            assert float(rest.max()) == pytest.approx(float(log_prob + result.log_normalizer[b]))
            assert pose[:2] == pytest.approx([float(map.first[b, 0]) + a[2] / 2, float(map.first[b, 1]) - a[1] / 2])
            assert math.cos(pose[2] - 2 * math.pi * a[0] / 48) == pytest.approx(1)
            turned = torch.minimum((k - a[0]).abs(), 48 - (k - a[0]).abs()) < 4
            rest[turned & ((v - a[1]).abs() < 10) & ((u - a[2]).abs() < 10)] = -math.inf


def test_loss_is_the_interpolated_log_probability():
    map, codes = vectors()
    poses = torch.tensor([[0.3, -0.8, 3.0], [-1.1, 1.4, -0.6]], dtype=F64)
    loss = network().loss(map, codes, poses)
    for b in range(2):
        every = [logit(map, codes, b, d, v, u) for d in range(4) for v in range(9) for u in range(7)]
        normalizer = math.log(sum(math.exp(x) for x in every))
        assert float(loss[b]) == pytest.approx(normalizer - by_hats(map, codes, b, poses[b].tolist()))


def test_loss_outside_of_the_map_is_that_at_its_border():
    map, codes = vectors()
    poses = torch.tensor([[1e6, 0.3, 1.0], [-0.2, -1e6, 1.0]], dtype=F64)
    border = torch.tensor([[1.5, 0.3, 1.0], [-0.2, -2.0, 1.0]], dtype=F64)
    torch.testing.assert_close(network().loss(map, codes, poses), network().loss(map, codes, border))


def test_training_finds_images_on_maps():
    """Each image shows the colour of its place: a few steps make the loss fall far below that of a guess."""
    net = network(16, stride=1).float()
    g = torch.Generator().manual_seed(0)
    classes = torch.rand(4, 3, 10, 12, generator=g)
    places = torch.stack([torch.randint(0, 10, (4,), generator=g), torch.randint(0, 12, (4,), generator=g)], -1)
    images = classes[range(4), :, places[:, 0], places[:, 1]].view(4, 3, 1, 1).expand(4, 3, 8, 8)
    x, y = 0.5 * (places[:, 1] - 5.5), 0.5 * (4.5 - places[:, 0])
    truth = torch.stack([x, y, torch.full((4,), math.pi / 2)], -1)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        loss = net.loss(net.encode_map(classes, 2.0), net.encode_images(images), truth).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.6 * math.log(4 * 10 * 12)
    result = net.search(net.encode_map(classes, 2.0), net.encode_images(images), 1)
    assert (result.poses[:, 0, 2] - math.pi / 2).abs().max() < 1e-6


# ---- Retrieval (PF) --------------------------------------------------------------------------------------------------


def test_likelihood_interpolates_in_position_and_around_the_circle():
    map, codes = vectors()
    g = torch.Generator().manual_seed(1)
    particles = torch.randn(2, 12, 3, generator=g, dtype=F64) * torch.tensor([1.5, 2.0, 4.0])
    particles[0, 0] = torch.tensor([0.0, 0.0, 2 * math.pi - 0.01])
    particles[0, 1] = torch.tensor([300.0, 0.0, 0.0])
    weights = RetrievalLikelihood(map)(particles, codes)
    for b in range(2):
        expected = [by_hats(map, codes, b, pose) / 8 for pose in particles[b].tolist()]
        assert weights[b].tolist() == pytest.approx(expected, abs=1e-12)
    assert weights[0, 1] == 0


def test_likelihood_at_pixels_is_the_volume():
    map, codes = vectors(B=1)
    volume = network(8).volume(map, codes)
    result = network(8).search(map, codes, 1)
    weight = RetrievalLikelihood(map, sigma=3.0)(result.poses, codes)
    assert float(weight) == pytest.approx(float(volume.max()) / 18)


def test_dynamics_are_the_action_and_noise():
    dynamics = GaussianDynamics().to(F64)
    particles, noise = torch.zeros(1, 50000, 3, dtype=F64), torch.randn(1, 50000, dynamics.noise_size, dtype=F64)
    action = torch.tensor([[1.0, -2.0, 0.5]], dtype=F64)
    moved = dynamics(particles, noise, action)
    torch.testing.assert_close(moved.mean(1), action, rtol=0, atol=0.05)
    expected = torch.tensor([[2.5, 2.5, math.radians(15)]], dtype=F64)
    torch.testing.assert_close(moved.std(1), expected, rtol=0.02, atol=0)
    torch.testing.assert_close(dynamics(particles, noise), moved - action)


@pytest.mark.parametrize("kind", [mdps.TruncatedGradientParticleFilter, mdps.MixtureDensityParticleFilter])
def test_a_particle_filter_follows_the_best_place(kind):
    """The vectors fit the image better the nearer a pixel is to a moving place, and the more the heading fits."""
    T, code = 12, torch.eye(16)[:1]
    v, u, heading = torch.arange(81.0).view(-1, 1), torch.arange(81.0), torch.arange(4).view(-1, 1, 1) * math.pi / 2
    near = torch.exp(-((u - 50) ** 2 + (v - 30) ** 2) / 400) * (0.5 + 0.5 * (heading - math.pi / 2).cos())
    features = torch.zeros(1, 4, 16, 81, 81)
    features[0, :, 0], features[0, :, 1] = near, (1 - near**2).sqrt()
    map = centred_map(features.flatten(1, 2), 2.0)
    filter = kind(SPACE, GaussianDynamics(), RetrievalLikelihood(map), 250)
    initial = torch.randn(1, 250, 3) * torch.tensor([8.0, 8.0, 0.5]) + torch.tensor([0.0, 0.0, 1.3])
    beliefs = filter(code.expand(1, T, 16), initial, torch.zeros(1, T, 3), seed=torch.tensor(1))
    mean = beliefs.posterior.mean[0, -1].detach()
    assert (mean[:2] - torch.tensor([5.0, 5.0])).norm() < 3
    assert abs(float(mean[2]) - math.pi / 2) < 0.5


# ---- Input -----------------------------------------------------------------------------------------------------------


def test_bad_input():
    map, codes = vectors()
    net = network()
    with pytest.raises(ValueError, match=r"view: expected vectors \(2, 16\), got \(2, 15\)"):
        net.search(map, codes[:, :15])
    with pytest.raises(ValueError, match=r"map: expected features \(B, 64, H, W\), got \(2, 3, 4, 4\)"):
        net.loss(MapFeatures(torch.zeros(2, 3, 4, 4), map.first, 2.0), codes, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"truth: expected shape \(2, 3\)"):
        net.loss(map, codes, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="map_trunk: expected height and width"):
        Retrieval(nn.Conv2d(3, 6, 3), nn.Identity(), 6, 5).encode_map(torch.zeros(1, 3, 12, 8), 2.0)
    with pytest.raises(ValueError, match="sigma: expected a positive"):
        RetrievalLikelihood(map, 0.0)
    with pytest.raises(ValueError, match="std: expected 3"):
        GaussianDynamics((1.0, 2.0))
    with pytest.raises(ValueError, match="n_rotations: expected at least 1"):
        network(0)
