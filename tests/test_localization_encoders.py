"""The encoders of maps and images: their geometry against closed forms, their sizes, and what they refuse."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn

from mdps.localization import Grid, align, image_encoder
from mdps.localization.birds_eye import BirdsEyeEncoder, Encoders, plane_scores, project_columns, resample_columns
from mdps.localization.image_encoder import ImageEncoder, ray_directions
from mdps.localization.map_encoder import MapEncoder
from mdps.localization.sizes import FULL, SMALL

CAMERAS = [  # fx, fy, cx, cy of images of 128 x 128 pixels
    (64.0, 64.0, 63.5, 63.5),
    (64.0, 64.0, 40.0, 70.0),  # off-centre
    (110.0, 90.0, 80.25, 63.5),
]
FINE = replace(SMALL, scale_bins=1025)
"""Scales so fine that a depth plane is one."""


def has_torchvision():
    try:
        image_encoder.torchvision_models()
    except ImportError:
        return False
    return True


needs_torchvision = pytest.mark.skipif(not has_torchvision(), reason="needs torchvision for this torch")


def images(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def classes(height, width, batch=1):
    """A map at random, mostly void."""
    groups = [torch.randint(0, n + 1, (batch, height, width)) for n in (7, 10, 33)]
    return (torch.stack(groups, 1) * (torch.rand(batch, 3, height, width) < 0.3)).to(torch.uint8)


class MadeNetwork(nn.Module):
    """In place of an image network: given features and scores, half the image's size."""

    def __init__(self, features, scores):
        super().__init__()
        self.made = features, scores

    def forward(self, images, camera):
        return self.made


def made_image(landmarks, camera):
    """Features and sharp scores of an image of poles at (x right, z ahead), one channel each.

    A pole covers the two columns of features between which it appears, as bilinear interpolation would have it. Elsewhere all
    depths are equally unlikely.
    """
    fx, fy, cx, _ = camera
    features = torch.zeros(1, FINE.latent, 64, 64)
    scores = torch.full((1, FINE.scale_bins, 64, 64), -30.0)
    bins = torch.linspace(*FINE.scale_range, FINE.scale_bins)
    for channel, (x, z) in enumerate(landmarks):
        column = (fx * x / z + cx + 0.5) / 2 - 0.5  # of the features: the middle of two pixels of the image
        for u in (math.floor(column), math.floor(column) + 1):
            if 0 <= u < 64:
                features[0, channel, 20:30, u] = 1 - abs(u - column)
                scores[0, :, 20:30, u] = -2000 * (bins - math.log2(fy / 2 / z)).abs()[:, None]
    return features, scores


def only_geometry(encoder, features, scores):
    """Take from an encoder everything that is learned."""
    encoder.network, encoder.blocks, encoder.features = MadeNetwork(features, scores), nn.Identity(), nn.Identity()
    encoder.features.weight = torch.zeros(())
    return encoder


@pytest.mark.parametrize("camera", CAMERAS)
@pytest.mark.parametrize("x, z", [(0, 8), (3, 10), (-2, 5), (5, 24), (-4, 16)])
def test_a_pole_lands_in_its_cell(camera, x, z):
    encoder = only_geometry(BirdsEyeEncoder(FINE), *made_image([(x, z)], camera))
    view = encoder(images(1, 3, 128, 128), torch.tensor([camera]))
    row, column = SMALL.grid.depth - z, SMALL.grid.width // 2 + x
    pole = view.features[0, 0]
    assert view.valid[0, row, column]
    assert divmod(int(pole.argmax()), SMALL.grid.width) == (row, column)
    exact = (camera[0] * x / z + camera[2] + 0.5) / 2 - 0.5  # what is between two columns is averaged twice
    share = exact - math.floor(exact)
    assert pole[row, column] == pytest.approx(share**2 + (1 - share) ** 2, abs=1e-3)
    assert pole[torch.arange(SMALL.grid.depth) != row].max() < 1e-3


@pytest.mark.parametrize("camera", CAMERAS)
def test_a_view_fits_the_map_where_it_was_taken(camera):
    """Landmarks on a made map, an image of them: among poses around it the true one scores best."""
    encoders = Encoders(FINE)
    pose = torch.tensor([11.0, -7.0, math.radians(90.0 + 53.1301)])  # North-west by a 3-4-5 triangle
    ahead, right = (-0.8, 0.6), (0.6, 0.8)
    landmarks = [(-1.0, 5.0), (4.0, 13.0), (-3.0, 18.0), (7.0, 26.0)]
    encoders.image = only_geometry(encoders.image, *made_image(landmarks, camera))
    map = encoders.encode_map(torch.zeros(1, 3, 200, 240, dtype=torch.uint8), 2.0)
    features = torch.zeros(1, SMALL.latent, 100, 120)
    for channel, (x, z) in enumerate(landmarks):
        east, north = (pose[i] + x * right[i] + z * ahead[i] for i in (0, 1))
        column, row = (east - map.first[0, 0]) * map.pixels_per_metre, (map.first[0, 1] - north) * map.pixels_per_metre
        u, v = torch.arange(120), torch.arange(100)[:, None]
        features[0, channel] = torch.exp(-((u - column) ** 2 + (v - row) ** 2) / 2)
    view = encoders.encode_images(images(1, 1, 3, 128, 128), torch.tensor([[camera]]))
    view = view._replace(
        features=view.features[:, 0], confidence=torch.ones_like(view.confidence[:, 0]), valid=view.valid[:, 0]
    )
    steps = [(x, y, a) for x in (-2, -1, 0, 1, 2) for y in (-2, -1, 0, 1, 2) for a in (-0.15, 0, 0.15, math.pi)]
    scores = align(map._replace(features=features), view, pose + torch.tensor(steps)[None], SMALL.grid)
    assert steps[int(scores[0].argmax())] == (0, 0, 0)


@pytest.mark.parametrize("camera", CAMERAS)
@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
def test_valid_is_the_field_of_view(camera, sizes):
    fx, _, cx, _ = camera
    grid, columns = sizes.grid, 64
    _, valid = resample_columns(
        torch.zeros(1, grid.depth, columns, 1), torch.tensor([fx / 2]), torch.tensor([(cx + 0.5) / 2 - 0.5]), grid
    )
    for i in range(grid.depth):
        z = (grid.depth - i) * grid.cell
        left, right = (0.5 - cx) / fx * z, (2 * columns - 1.5 - cx) / fx * z  # through the outer features' middles
        for j in range(grid.width):
            x = (j - grid.width // 2) * grid.cell
            if abs(x - left) > 1e-3 * z and abs(x - right) > 1e-3 * z:
                assert valid[0, i, j] == (left < x < right)


def test_half_of_the_grid_is_seen_by_ninety_degrees():
    view = BirdsEyeEncoder(SMALL)(images(1, 3, 128, 128), torch.tensor(CAMERAS[:1]))
    assert view.valid.float().mean() == pytest.approx(0.5, abs=0.02)


def test_columns_are_averaged_as_by_a_loop():
    features, scores = torch.randn(2, 5, 4, 3, dtype=torch.float64), torch.randn(2, 5, 4, 6, dtype=torch.float64)
    polar = project_columns(features, scores)
    assert polar.shape == (2, 6, 4, 3)
    for n in range(2):
        for d in range(6):
            for w in range(4):
                weights = np.exp(scores[n, :, w, d].numpy())
                expected = (weights[:, None] * features[n, :, w].numpy()).sum(0) / weights.sum()
                np.testing.assert_allclose(polar[n, d, w], expected, rtol=1e-13)
    torch.testing.assert_close(project_columns(torch.ones_like(features), scores), torch.ones_like(polar))


def test_scores_are_interpolated_between_scales():
    scores = torch.randn(2, 3, 4, 33, dtype=torch.float64)
    focal_length, depths = torch.tensor([40.0, 3.0], dtype=torch.float64), torch.tensor([0.01, 0.7, 4, 9, 31])
    planes = plane_scores(scores, focal_length, depths.double(), (0.0, 9.0))
    for n in range(2):
        for d in range(5):
            scale = np.log2(focal_length[n].item() / depths[d].item())  # also beyond both ends
            for h in range(3):
                for w in range(4):
                    expected = np.interp(scale, np.linspace(0, 9, 33), scores[n, h, w].numpy())
                    assert planes[n, h, w, d].item() == pytest.approx(expected, rel=1e-6)


def test_columns_are_resampled_linearly():
    grid = Grid(0.5, 6, 9)
    polar = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    focal_length, centre = torch.tensor([5.0, 8.0], dtype=torch.float64), torch.tensor([2.5, 4.0], dtype=torch.float64)
    cells, valid = resample_columns(polar, focal_length, centre, grid)
    for n in range(2):
        for i in range(6):
            u = centre[n].item() + focal_length[n].item() * (np.arange(9) - 4) / (6 - i)
            inside = (u >= 0) & (u <= 6)
            np.testing.assert_array_equal(valid[n, i], inside)
            for c in range(3):
                expected = np.interp(u, np.arange(7), polar[n, i, :, c].numpy())
                np.testing.assert_allclose(cells[n, i, :, c], np.where(inside, expected, 0), atol=1e-12)


def test_rays_point_where_pixels_look():
    x, y = ray_directions(torch.tensor([[50.0, 40.0, 3.0, 1.0]]), 4, 6)[0]
    for v in range(4):
        for u in range(6):
            assert x[v, u] == pytest.approx((u - 3) / 50) and y[v, u] == pytest.approx((v - 1) / 40)


@pytest.mark.parametrize("z", [1.5, 4.0, 20.0])
def test_depth_is_that_of_the_best_scale(z):
    camera = CAMERAS[2]
    features, scores = made_image([(0.0, z)], camera)
    bins = torch.linspace(*FINE.scale_range, FINE.scale_bins)
    scores[:, bins > math.log2(camera[1])] = 1e4  # closer than the view begins: nothing that anybody trained
    depth = only_geometry(BirdsEyeEncoder(FINE), features, scores).depth(images(1, 3, 128, 128), torch.tensor([camera]))
    assert depth.shape == (1, 64, 64)
    assert depth[0, 25, int((camera[2] + 0.5) / 2 - 0.5)].item() == pytest.approx(z, rel=0.005)


def only_first_convolution(encoder):
    """Make of a map encoder one that gives the share of each square that is class 1 of the areas."""
    level = nn.Conv2d(3 * SMALL.embedding, 1, encoder.stride, stride=encoder.stride, bias=False)
    nn.init.zeros_(level.weight)
    with torch.no_grad():
        level.weight[:, 0] = 1 / encoder.stride**2
        encoder.embedding.weight[:] = 0
        encoder.embedding.weight[1, 0] = 1
    encoder.levels, encoder.decoder, encoder.output = nn.ModuleList([level]), nn.ModuleList(), nn.Identity()


@torch.no_grad()
def test_a_building_lies_where_the_map_has_it():
    encoders = Encoders(SMALL)
    only_first_convolution(encoders.map)
    made = torch.zeros(1, 3, 60, 100, dtype=torch.uint8)
    made[0, 0, 7:21, 51:85] = 1  # odd borders: squares that are half inside
    made[0, 1, 7:21, 51:85] = 1  # a way of the same number is another class
    map = encoders.encode_map(made, 2.0)
    assert map.pixels_per_metre == 1.0 and map.features.shape == (1, 1, 30, 50)
    share = map.features[0, 0]
    x = map.first[0, 0] + torch.arange(50) / map.pixels_per_metre
    y = map.first[0, 1] - torch.arange(30) / map.pixels_per_metre
    assert share.sum() == pytest.approx(14 * 34 / 4)
    # edges in metres from the middle of the map: pixel u begins at u / 2 - 25 m, row v at 15 - v / 2 m
    assert (share.sum(0) * x).sum() / share.sum() == pytest.approx((51 + 85) / 4 - 25, abs=1e-4)
    assert (share.sum(1) * y).sum() / share.sum() == pytest.approx(15 - (7 + 21) / 4, abs=1e-4)


def test_a_shifted_map_has_shifted_features():
    """By as many pixels as the coarsest resolution has: away from the border a place looks the same on every crop."""
    encoder, shift = MapEncoder(SMALL), 16
    made = classes(352, 352)
    first, second = encoder(made[..., :320, :320]), encoder(made[..., shift:336, 2 * shift : 352])
    inner = slice(68, 92)  # the network sees 60 features far
    moved = first[..., 68 + shift // 2 : 92 + shift // 2, 68 + shift : 92 + shift]
    torch.testing.assert_close(second[..., inner, inner], moved, rtol=1e-4, atol=1e-5)


def test_a_map_of_any_size():
    encoder = MapEncoder(SMALL)
    made = classes(352, 352)
    whole, cut = encoder(made), encoder(made[..., :298, :214])
    assert cut.shape == (1, 8, 149, 107)
    assert cut.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(cut[..., :60, :40], whole[..., :60, :40], rtol=1e-4, atol=1e-5)


def test_replicated_borders_make_a_uniform_map_uniform():
    encoder = MapEncoder(FULL).eval()
    made = torch.tensor([3, 5, 7], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 18, 21)
    features = encoder(made)
    torch.testing.assert_close(features, features[..., :1, :1].expand_as(features), rtol=1e-4, atol=1e-5)


def reached(encoders, n_pixels):
    """Names of parameters without a gradient."""
    camera = torch.tensor(CAMERAS).expand(1, 3, 4)
    view = encoders.encode_images(images(1, 3, 3, n_pixels, n_pixels), camera)
    map = encoders.encode_map(classes(2 * n_pixels, 2 * n_pixels), 2.0)
    (view.features.square().sum() + view.confidence.sum() + map.features.square().sum()).backward()
    return [name for name, p in encoders.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_gradients_reach_all_parameters():
    assert reached(Encoders(SMALL), 128) == []


@needs_torchvision
def test_gradients_reach_all_parameters_of_the_full_size():
    assert reached(Encoders(FULL), 64) == []


@needs_torchvision
def test_the_full_size_is_the_published_one():
    """43.26, 11.72 and 0.07 million parameters were counted in OrienterNet's release."""
    with torch.device("meta"):
        encoders = Encoders(FULL)
    image, map = count(encoders.image.network), count(encoders.map)
    assert image == pytest.approx(43.26e6, rel=0.005)
    assert map == pytest.approx(11.72e6, rel=0.001)
    assert count(encoders.image) - image == pytest.approx(0.07e6, rel=0.05)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("shape", [(128, 128), (45, 93)])
def test_chunked_is_whole(shape):
    encoders = Encoders(SMALL)
    some, camera = images(2, 3, 3, *shape), torch.tensor(CAMERAS).expand(2, 3, 4)
    with torch.no_grad():
        whole, chunked = encoders.encode_images(some, camera), encoders.encode_images(some, camera, chunk=4)
    grid = SMALL.grid
    assert whole.features.shape == (2, 3, 8, grid.depth, grid.width)
    assert whole.confidence.shape == whole.valid.shape == (2, 3, grid.depth, grid.width)
    assert whole.valid.dtype == torch.bool
    for one, other in zip(whole, chunked):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_under_autocast():
    encoders = Encoders(SMALL)
    some, camera = images(1, 2, 3, 128, 128), torch.tensor(CAMERAS[:2])[None]
    with torch.no_grad():
        exact = encoders.encode_images(some, camera)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = encoders.encode_images(some, camera)
    assert torch.equal(exact.valid, rounded.valid)
    torch.testing.assert_close(exact.features, rounded.features.float(), rtol=0.1, atol=0.1)


def test_an_untrained_narrow_network_separates_places():
    """Nothing has died: features of different places differ."""
    features = MapEncoder(SMALL)(classes(128, 128))
    assert (features.std((0, 2, 3)) > 0.02).all()


def test_bad_images_are_refused():
    encoders = Encoders(SMALL)
    camera = torch.tensor(CAMERAS[:1])
    with pytest.raises(ValueError, match=r"images: expected uint8 \(N, 3, H, W\), got torch.float32 \(1, 3, 8, 8\)"):
        encoders.image(torch.zeros(1, 3, 8, 8), camera)
    with pytest.raises(ValueError, match=r"camera: expected floating point \(1, 4\), got torch.float32 \(1, 3\)"):
        encoders.image(images(1, 3, 8, 8), camera[:, :3])
    with pytest.raises(ValueError, match=r"images, camera: expected \(B, T, 3, H, W\) and \(B, T, 4\)"):
        encoders.encode_images(images(1, 3, 8, 8), camera)
    with pytest.raises(ValueError, match="chunk: expected at least 1, got 0"):
        encoders.encode_images(images(1, 1, 3, 8, 8), camera[None], chunk=0)


def test_bad_maps_are_refused():
    encoder = MapEncoder(SMALL)
    with pytest.raises(ValueError, match=r"classes: expected uint8 \(B, 3, H, W\), got torch.int64"):
        encoder(torch.zeros(1, 3, 8, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"multiples of 2, got \(8, 9\)"):
        encoder(torch.zeros(1, 3, 8, 9, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"at most \(7, 10, 33\), got \(8, 0, 0\)"):
        encoder(torch.zeros(1, 3, 8, 8, dtype=torch.uint8).index_fill(1, torch.tensor(0), 8))


def test_without_torchvision_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="needs torchvision as built for torch .*: pip install torchvision"):
        ImageEncoder(FULL)


def test_pretrained_weights_that_cannot_be_had(monkeypatch):
    def offline(weights):
        raise URLError("no network")

    weights = SimpleNamespace(DEFAULT=SimpleNamespace(url="https://example.org/resnet101-abc.pth"))
    models = SimpleNamespace(resnet101=offline, ResNet101_Weights=weights)
    monkeypatch.setattr(image_encoder, "torchvision_models", lambda: models)
    message = (
        r"pretrained: cannot load resnet101-abc.pth \(.*no network.*\); get https://example.org/resnet101-abc.pth "
        r"and put it into .*/checkpoints, or train from scratch with pretrained=False"
    )
    with pytest.raises(RuntimeError, match=message):
        ImageEncoder(FULL, pretrained=True)
    with pytest.raises(ValueError, match="pretrained: expected False for a narrow image network"):
        ImageEncoder(SMALL, pretrained=True)


@needs_torchvision
def test_pretrained_weights_are_found_where_the_error_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    models = image_encoder.torchvision_models()
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    made = models.resnet18()
    torch.save(made.state_dict(), folder / models.ResNet18_Weights.DEFAULT.url.rsplit("/", 1)[1])
    sizes = replace(FULL, image_backbone="resnet18")
    encoder = ImageEncoder(sizes, pretrained=True)
    torch.testing.assert_close(encoder.levels[2][0].conv1.weight, made.layer2[0].conv1.weight)
    with pytest.raises(ValueError, match="image_backbone: expected one of resnet18, .*, got 'vgg11'"):
        ImageEncoder(replace(FULL, image_backbone="vgg11"))
