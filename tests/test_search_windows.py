"""Windows of maps, and searches that follow a made trajectory through them."""

import math

import pytest
import torch

from mdps.localization import BirdsEyeView, Grid, centred_map, errors, volumes
from mdps.localization.dense_search import DenseSearch
from mdps.localization.volumes import SearchResult
from mdps.localization.windows import crop, search_near, search_sliding_window, search_true_window

F64 = torch.float64


def numbered(B=2, height=20, width=30, ppm=2.0):
    """A map whose channels are its pixels' x and y."""
    map = centred_map(torch.zeros(B, 2, height, width, dtype=F64), ppm)
    x = map.first[0, 0] + torch.arange(width, dtype=F64) / ppm
    y = map.first[0, 1] - torch.arange(height, dtype=F64) / ppm
    pixels = torch.stack([x.expand(height, width), y.unsqueeze(-1).expand(height, width)])
    return map._replace(features=pixels.expand(B, 2, height, width).contiguous())


@pytest.mark.parametrize("centre", [(0.0, 0.0), (1.3, -2.6), (-7.0, 4.9), (100.0, 100.0), (7.25, -4.75), (-1e9, 0.0)])
@pytest.mark.parametrize("size", [0.1, 2.0, 3.5, 9.0, 14.9, 500.0])
@pytest.mark.parametrize("ppm", [2.0, 0.5])
def test_windows_know_where_they_lie(centre, size, ppm):
    map = numbered(ppm=ppm)
    window = crop(map, torch.tensor([centre, (0.0, 0.0)], dtype=F64), size)
    height, width = window.features.shape[-2:]
    n = max(1, round(size * ppm))
    assert (height, width) == (min(n, 20), min(n, 30))
    torch.testing.assert_close(window.features[:, :, 0, 0], window.first)
    last = window.first + torch.tensor([width - 1, 1 - height]) / ppm
    torch.testing.assert_close(window.features[:, :, -1, -1], last)
    # As near to the centre as the map allows.
    middle = (window.first[0] + last[0]) / 2
    for i, pixels in ((0, width), (1, height)):
        room = (30, 20)[i] / ppm / 2 - pixels / ppm / 2
        assert abs(float(middle[i]) - max(-room, min(room, centre[i]))) <= 0.5 / ppm + 1e-9


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_several_windows_of_one_map(layout):
    """The same windows, and gradients of the map, as of a copy of the map for each."""
    whole = torch.randn(2, 3, 40, 50, dtype=F64).contiguous(memory_format=layout).requires_grad_()
    copied = whole.detach().clone().requires_grad_()
    rows, centres = torch.tensor([1, 0, 0, 1, 1]), 20 * (torch.rand(5, 2, dtype=F64) - 0.5)
    map, weights = numbered(), torch.randn(5, 3, 12, 12, dtype=F64)
    got = crop(map._replace(features=whole), centres, 6.0, rows)
    want = [
        crop(map._replace(features=copied[row : row + 1], first=map.first[row : row + 1]), centre.unsqueeze(0), 6.0)
        for row, centre in zip(rows, centres)
    ]
    assert torch.equal(got.features, torch.cat([w.features for w in want]))
    assert torch.equal(got.first, torch.cat([w.first for w in want]))
    (got.features * weights).sum().backward()
    sum((w.features * x).sum() for w, x in zip(want, weights)).backward()
    torch.testing.assert_close(whole.grad, copied.grad, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: crop(map._replace(features=x), centres, 1.0, rows).features, whole)


def test_windows_alone_are_copied():
    """No tensor as large as the maps for each window is made, on the way there or back."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            out = function(*arguments, **(named or {}))
            made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
            sizes.extend(x.numel() for x in made)
            return out

    features = torch.zeros(2, 4, 200, 200, requires_grad=True)
    map = centred_map(features, 2.0)
    with Watch():
        crop(map, torch.zeros(60, 2), 5.0, torch.arange(2).repeat_interleave(30)).features.sum().backward()
    assert max(sizes) == features.numel() and sum(size == features.numel() for size in sizes) <= 4


def test_bad_windows():
    map = numbered()
    with pytest.raises(ValueError, match=r"rows: expected numbers of 2 maps, got \[0, 2\]"):
        crop(map, torch.zeros(2, 2), 5.0, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"centres: expected shape \(3, 2\) or \(3, 3\), got \(2, 2\)"):
        crop(map, torch.zeros(2, 2), 5.0, torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"centres: expected shape \(2, 2\) or \(2, 3\), got \(1, 2\)"):
        crop(map, torch.zeros(1, 2), 5.0)
    with pytest.raises(ValueError, match="centres: expected finite"):
        crop(map, torch.full((2, 3), math.nan), 5.0)
    with pytest.raises(ValueError, match="size: expected a positive"):
        crop(map, torch.zeros(2, 2), 0.0)


class Nearest:
    """Finds the pixel of its window that is nearest to what it is shown, a position, and reports the window."""

    def __init__(self):
        self.windows = []

    def search(self, map, view, k=3):
        self.windows.append(map)
        apart = (map.features - view[:, :2, None, None]).norm(dim=1).flatten(1)
        best = map.features.flatten(2).gather(2, apart.argmin(1).view(-1, 1, 1).expand(-1, 2, 1)).squeeze(2)
        poses = torch.cat([best, view[:, 2:]], 1).unsqueeze(1).expand(-1, k, 3)
        return SearchResult(poses, torch.zeros(len(view), k, dtype=F64), apart.amin(1))


def trajectory(T=12, B=2):
    """Drives from the south-west to the north-east of a map of 60 m, and another way."""
    t = torch.arange(T, dtype=F64)
    first = torch.stack([-25 + 4 * t, -20 + 3.5 * t, torch.full_like(t, 3.0)], -1)
    second = torch.stack([20 - 3 * t, 10 * (t / 3).sin(), t], -1)
    truth = torch.stack([first, second])
    actions = torch.cat([truth[:, :1] * math.nan, truth.diff(dim=1)], 1)
    return truth, actions


def test_a_sliding_window_follows_a_trajectory():
    map, searcher = numbered(height=120, width=120), Nearest()
    truth, actions = trajectory()
    result = search_sliding_window(searcher, map, truth.unbind(1), truth[:, 0], actions, size=8.0, k=2)
    assert result.poses.shape == (2, 12, 2, 3) and result.log_normalizer.shape == (2, 12)
    assert (result.poses[:, :, 0, :2] - truth[..., :2]).abs().max() <= 0.25 + 1e-9
    assert all(w.features.shape[-2:] == (16, 16) for w in searcher.windows)


def test_a_sliding_window_that_is_told_nothing_of_motion_loses_the_vehicle():
    """It ends at most half a window a frame from where it began: the window is where the last search was."""
    map, truth = numbered(height=120, width=120), trajectory()[0]
    result = search_sliding_window(Nearest(), map, truth.unbind(1), truth[:, 0], torch.zeros_like(truth), size=3.0, k=1)
    error = (result.poses[:, :, 0, :2] - truth[..., :2]).norm(dim=-1)
    assert error[0, 0] < 0.4 and error[0, -1] > 20
    steps = result.poses[:, :, 0, :2].diff(dim=1).abs()
    assert steps.max() <= 1.5 + 1e-9


def test_windows_around_the_truth():
    map, searcher = numbered(height=120, width=120), Nearest()
    truth, _ = trajectory()
    views = (pose + torch.tensor([100.0, 0.0, 0.0]) for pose in truth.unbind(1))
    result = search_true_window(searcher, map, views, truth, size=8.0, k=1)
    # Whatever is seen, the search cannot leave the window.
    assert ((result.poses[:, :, 0, :2] - truth[..., :2]).abs() <= 4 + 0.25).all()
    inside = truth[..., 0] < 25
    apart = (result.poses[:, :, 0, 0] - truth[..., 0])[inside]
    assert ((apart >= 3.25) & (apart <= 4.25)).all()


def test_where_nothing_is_observed_the_pose_is_moved_by_the_action():
    map, (truth, actions) = numbered(height=120, width=120), trajectory()
    observed = torch.ones(2, 12, dtype=torch.bool)
    observed[0, 3:6] = False
    views = truth.clone()
    views[0, 3:6] = 0.0
    run = search_sliding_window(Nearest(), map, views.unbind(1), truth[:, 0], actions, observed, size=8.0, k=2)
    expected = run.poses[0, 2, 0] + actions[0, 3:6].cumsum(0)
    torch.testing.assert_close(run.poses[0, 3:6, 0, :2], expected[:, :2])
    assert run.log_probs[0, 4].tolist() == [0.0, -math.inf] and run.log_normalizer[0, 4] == 0
    assert (run.poses[:, 6:, 0, :2] - truth[:, 6:, :2]).abs().max() <= 0.25 + 1e-9


def test_frames_that_nobody_observes_are_not_searched():
    map, (truth, actions) = numbered(height=120, width=120), trajectory()
    observed = torch.ones(2, 12, dtype=torch.bool)
    observed[:, [0, 5]], observed[1, 7] = False, False
    for whole in (
        lambda s: search_sliding_window(s, map, truth.unbind(1), truth[:, 0], actions, observed, size=8.0, k=2),
        lambda s: search_true_window(s, map, truth.unbind(1), truth, observed, size=8.0, k=2),
    ):
        searcher = Nearest()
        run = whole(searcher)
        assert len(searcher.windows) == 10
        torch.testing.assert_close(run.poses[:, 0, 0], truth[:, 0])
        assert (run.log_normalizer[:, [0, 5]] == 0).all()
        assert (run.poses[:, :, 0, :2] - truth[..., :2]).abs().max() <= 0.25 + 1e-9


def test_the_truth_is_no_estimate():
    """Where a window lies around it and nothing was seen: at the start, and always in windows at the truth."""
    map, (truth, actions) = numbered(height=120, width=120), trajectory()
    observed = torch.ones(2, 12, dtype=torch.bool)
    observed[:, [0, 5]], observed[1, 1] = False, False
    options = {"observed": observed, "size": 8.0, "k": 2}
    sliding = search_sliding_window(Nearest(), map, truth.unbind(1), truth[:, 0], actions, **options)
    at_truth = search_true_window(Nearest(), map, truth.unbind(1), truth, **options)
    has = observed.cumsum(1) > 0
    assert torch.equal(sliding.log_probs[..., 0] > -math.inf, has) and has[:, 5].all() and not has[1, 1]
    assert torch.equal(at_truth.log_probs[..., 0] > -math.inf, observed)
    hidden = errors.pose_errors(at_truth.poses[..., 0, :], truth).position[~observed]
    assert (hidden == 0).all()  # what would have been counted
    best = errors.best_jointly(at_truth.poses, truth, at_truth.log_probs).position
    assert (best[~observed] == math.inf).all()


def test_dense_search_in_a_window_is_dense_search_of_that_piece_of_map():
    """A view of the only landmark: the window finds it where the whole map does, in the same frame."""
    grid = Grid(0.5, 6, 7)
    features = torch.zeros(1, 1, 60, 60, dtype=F64)
    features[0, 0, 20, 41] = 1.0
    map = centred_map(features, 2.0)
    seen = torch.zeros(1, 1, 6, 7, dtype=F64)
    seen[0, 0, 2, 4] = 1.0
    view = BirdsEyeView(seen, torch.ones(1, 6, 7, dtype=F64), torch.ones(1, 6, 7, dtype=torch.bool))
    search = DenseSearch(grid, 4).to(F64)
    truth = torch.tensor([[[6.0, 2.0, 0.0]]], dtype=F64)
    window = search_true_window(search, map, [view], truth, size=12.0, k=4)
    whole = search.search(map, view, 4)
    # Four headings see it from four places, all equally well.
    order = [x[0].flatten(0, -2)[:, 2].argsort() for x in (window.poses, whole.poses)]
    torch.testing.assert_close(window.poses[0, 0][order[0]], whole.poses[0][order[1]])
    east = whole.poses[0][(whole.poses[0, :, 2].abs() < 1e-6)][0]
    x, y = (41 - 29.5) / 2, (29.5 - 20) / 2
    torch.testing.assert_close(east, torch.tensor([x - 4 * 0.5, y + 0.5, 0.0], dtype=F64))


def test_search_near_a_guess():
    """As by a search of the whole map in that region."""
    grid, headings = Grid(0.5, 6, 7), 8
    random = torch.Generator().manual_seed(0)
    map = centred_map(torch.rand(1, 1, 90, 100, dtype=F64, generator=random), 2.0)
    seen = torch.rand(1, 1, 6, 7, dtype=F64, generator=random)
    view = BirdsEyeView(seen, torch.ones(1, 6, 7, dtype=F64), torch.ones(1, 6, 7, dtype=torch.bool))
    search = DenseSearch(grid, headings).to(F64)
    turn = math.radians(30)
    guesses = torch.tensor([[[-4.0, 10.0, 0.1], [14.0, -14.0, -1.6], [0.0, 0.0, 0.0], [16.0, -12.0, 0.0]]], dtype=F64)
    observed, near = torch.tensor([[True, True, True, False]]), {"metres": 9.0, "turn": turn}
    found = search_near(search, map, [view] * 4, guesses, observed, **near, margin=4.0, k=2)
    for t, guess in enumerate(guesses[0, :3]):
        want = search.search(map, view, 2, volumes.Region(guess.unsqueeze(0), 9.0, turn))
        torch.testing.assert_close(found.poses[0, t], want.poses[0])
        torch.testing.assert_close(found.log_probs[0, t], want.log_probs[0])
        torch.testing.assert_close(found.log_normalizer[0, t], want.log_normalizer[0])
        off = errors.pose_errors(found.poses[0, t, 0], guess)
        assert off.position <= 9.0 and off.angle <= turn
    assert (found.log_probs[0, 3] == -math.inf).all()  # nothing was seen
    far = search_near(search, map, [view], guesses[:, :1] + 1000.0, **near)
    assert (far.log_probs == -math.inf).all()
    with pytest.raises(ValueError, match=r"guesses: expected shape \(1, T, 3\)"):
        search_near(search, map, [view], guesses[0], **near)
    with pytest.raises(ValueError, match="region: expected a radius above 0 and a turn of at least"):
        search_near(search, map, [view], guesses[:, :1], metres=9.0, turn=0.1)


def test_bad_sequences():
    map, (truth, actions) = numbered(height=120, width=120), trajectory()
    views = truth.unbind(1)
    for wrong in (views[:-1], [*views, views[0]]):
        with pytest.raises(ValueError, match="views: expected 12, got"):
            search_sliding_window(Nearest(), map, wrong, truth[:, 0], actions)
    with pytest.raises(ValueError, match=r"start: expected shape \(2, 3\)"):
        search_sliding_window(Nearest(), map, views, truth, actions)
    with pytest.raises(ValueError, match=r"actions: expected shape \(2, T, 3\)"):
        search_sliding_window(Nearest(), map, views, truth[:, 0], actions[:1])
    with pytest.raises(ValueError, match="truth: expected shape"):
        search_true_window(Nearest(), map, views, truth[..., :2])
    with pytest.raises(ValueError, match=r"observed: expected bool \(2, 12\)"):
        search_true_window(Nearest(), map, views, truth, torch.ones(2, 12))
