import math

import numpy as np
import pytest
import torch
from scipy import optimize, special
from table import EMULATED, Case, check_errors, checks

import mdps
from mdps import ops

# An oracle in numpy and scipy: every mode that a minimiser reaches from any mean, then the highest of those that are apart.


class Row:
    """One mixture: its log-density, with gradient."""

    def __init__(self, means, log_weights, bandwidths, n_angular):
        self.g = means.shape[1] - n_angular
        self.means, self.log_weights, self.bandwidths = means, log_weights, bandwidths
        self.kappa = bandwidths[self.g :] ** -2.0
        self.norm = -np.log(bandwidths[: self.g] * math.sqrt(2 * math.pi)).sum()
        self.norm -= np.log(2 * math.pi * special.i0e(self.kappa)).sum()

    def log_density(self, x):
        d = x - self.means
        a = self.log_weights - 0.5 * ((d[:, : self.g] / self.bandwidths[: self.g]) ** 2).sum(1)
        a = a - (2 * self.kappa * np.sin(d[:, self.g :] / 2) ** 2).sum(1)
        p = special.softmax(a)[:, None]
        slope = np.concatenate([-d[:, : self.g] / self.bandwidths[: self.g] ** 2, -self.kappa * np.sin(d[:, self.g :])], 1)
        return special.logsumexp(a) + self.norm, (p * slope).sum(0)

    def hessian(self, x):
        h = 1e-5 * np.minimum(self.bandwidths, 1.0)
        both = [(self.log_density(x + e)[1] - self.log_density(x - e)[1]) / (2 * e.max()) for e in np.diag(h)]
        return 0.5 * (np.array(both) + np.array(both).T)

    def climb(self, x):
        """The maximum above x, or None where the minimiser stops at a saddle."""
        unit = np.minimum(self.bandwidths, 1.0)
        f = lambda y: tuple(-v for v in self.log_density(y * unit))  # noqa: E731
        x = optimize.minimize(f, x / unit, jac=True, method="BFGS", options={"gtol": 1e-7}).x * unit
        for _ in range(4):
            hessian = self.hessian(x)
            if np.linalg.eigvalsh(hessian * np.outer(unit, unit)).max() > -1e-6:
                return None
            x = x - np.linalg.solve(hessian, self.log_density(x)[1])
        return x

    def away(self, x, y):
        d = np.abs(x - y)
        d[self.g :] = np.abs(np.mod(d[self.g :] + math.pi, 2 * math.pi) - math.pi)
        return d

    def modes(self, radii):
        """All, by falling density."""
        radii = np.maximum(radii, 0.01 * np.minimum(self.bandwidths, np.where(np.arange(len(radii)) < self.g, np.inf, 1.0)))
        rng, ends = np.random.default_rng(0), []
        for mean in self.means[self.log_weights > -math.inf]:
            ends.append(self.climb(mean + 1e-3 * self.bandwidths * rng.uniform(-1, 1, len(mean))))
        ends = sorted((e for e in ends if e is not None), key=lambda e: -self.log_density(e)[0])
        found = []
        for e in ends:
            if not any((self.away(e, f) < radii).all() for f in found):
                found.append(e)
        return found


def brute_force(means, log_weights, bandwidths, n_modes, radii, n_angular=0):
    *lead, n, d = means.shape
    rows = math.prod(lead)
    args = means.reshape(rows, n, d), log_weights.reshape(rows, n), bandwidths.expand(*lead, d).reshape(rows, d)
    args = tuple(a.double().numpy() for a in args)
    modes = np.repeat(args[0][:, :1], n_modes, 1)
    log_densities = np.full((rows, n_modes), -math.inf)
    for b, (m, w, s) in enumerate(zip(*args)):
        if not np.isfinite(m).all() or not (w < math.inf).all():
            modes[b], log_densities[b] = math.nan, math.nan
        elif (w > -math.inf).any():
            row = Row(m, w, s, n_angular)
            found = row.modes(np.broadcast_to(radii, d))[:n_modes]
            modes[b] = found + found[:1] * (n_modes - len(found))
            log_densities[b, : len(found)] = [row.log_density(f)[0] for f in found]
    angles = modes[..., d - n_angular :]
    angles[:] = np.where(np.abs(angles) <= math.pi, angles, np.mod(angles + math.pi, 2 * math.pi) - math.pi)
    return torch.from_numpy(modes).view(*lead, n_modes, d), torch.from_numpy(log_densities).view(*lead, n_modes)


def clusters(*lead, n=20, d=3, n_angular=1, n_clusters=3, shared=True, spread=1.0, edit=None):
    """Components in clusters that are apart, bandwidths of about a cluster's size."""

    def make(g):
        centres = 8 * torch.randn(*lead, n_clusters, d, generator=g, dtype=torch.float64)
        pick = torch.arange(n) % n_clusters
        means = centres[..., pick, :] + 0.7 * spread * torch.randn(*lead, n, d, generator=g, dtype=torch.float64)
        log_weights = torch.randn(*lead, n, generator=g, dtype=torch.float64)
        bandwidths = 0.5 + 0.2 * torch.rand(*(() if shared else lead), d, generator=g, dtype=torch.float64)
        if edit:
            edit(means, log_weights, bandwidths)
        return means, log_weights, bandwidths

    return make


def strange(means, log_weights, bandwidths):
    log_weights[0, ::2] = -math.inf
    log_weights[1] = -math.inf
    log_weights[2, 3] = math.nan
    means[3, 2, 1] = math.nan
    log_weights[4, 0] = math.inf
    means[5, 1, 0] = math.inf


def seam(means, log_weights, bandwidths):
    """Around pi, the modes on either side of it."""
    means[..., -1] = math.pi + 0.5 * torch.randn(means.shape[:-1], generator=torch.Generator().manual_seed(3)).double()


def far(means, log_weights, bandwidths):
    means[..., 0] += 3e4
    bandwidths[..., 0] = 2.0


def case(name, args, n_modes=3, radii=(1.5, 1.5, 0.8), **options):
    more = {k: options.pop(k) for k in ("rtol", "atol", "vmap") if k in options}
    d = args(torch.Generator().manual_seed(0))[0].shape[-1]
    options = {"n_modes": n_modes, "radii": radii[:d] if isinstance(radii, tuple) else radii, **options}
    return Case(name, ops.find_modes, args, brute_force, options, rtol64=1e-8, **more)


CASES = [
    case("poses", clusters(4), n_angular=1),
    case("leading dimensions, own bandwidths", clusters(2, 3, shared=False), n_angular=1),
    case("a line", clusters(5, n=12, d=1), n_angular=0),
    case("a circle", clusters(5, n=12, d=1), n_modes=2, n_angular=1, radii=0.8),
    case("a plane", clusters(4, n=40, d=2), n_angular=0),
    case("two angles", clusters(4, n=15, d=2), n_angular=2),
    case("five dimensions", clusters(3, n=15, d=5), n_angular=2, radii=1.5),
    case("across the seam", clusters(4, edit=seam), n_angular=1),
    case("one component", clusters(3, n=1), n_angular=1),
    case("more than there are", clusters(3), n_modes=9, radii=3.0, n_angular=1),
    case("one mode in all the space", clusters(3), radii=math.inf, n_angular=1),
    case("no radii", clusters(3, n=9), radii=0.0, n_modes=9, n_angular=1),
    case("strange rows", clusters(7, edit=strange), n_angular=1),
    case("far from the origin", clusters(2, edit=far), n_angular=1, atol=4e-3),
    case("a hundred components", clusters(2, n=100, n_clusters=4, spread=0.5), n_angular=1),
    case("many components", clusters(1, n=140, n_clusters=4, spread=0.5), n_angular=1),
]
TestOperator = checks(CASES)


def rows_of(means, log_weights, bandwidths, n_angular):
    return [Row(m, w, bandwidths.numpy(), n_angular) for m, w in zip(means.numpy(), log_weights.numpy())]


def filterlike(B=40, N=60, d=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(B, N, d, generator=g, dtype=torch.float64)
    return means, torch.randn(B, N, generator=g, dtype=torch.float64).log_softmax(-1), torch.full((d,), 0.7).double()


@pytest.mark.parametrize("n_angular", [0, 1, 3])
def test_modes_are_maxima(n_angular):
    """The gradient is 0, no neighbour is higher, and the density is what mixture_log_prob says."""
    mixture = filterlike()
    modes, values = ops.find_modes(*mixture, 5, 0.5, n_angular=n_angular)
    assert (values > -math.inf).float().mean() > 0.7
    x = modes.clone().requires_grad_()
    at = ops.mixture_log_prob(x, *mixture, n_angular=n_angular)
    (slope,) = torch.autograd.grad(at.sum(), x)
    there = values > -math.inf
    torch.testing.assert_close(at[there], values[there], rtol=1e-12, atol=1e-12)
    assert (slope[there] * 0.7).abs().max() < 1e-9
    g = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2):
        near = modes + size * torch.randn(modes.shape, generator=g, dtype=torch.float64)
        assert (ops.mixture_log_prob(near, *mixture, n_angular=n_angular) < at + 1e-12)[there].all()


@pytest.mark.parametrize("n_angular", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_mode_is_at_least_as_high_as_any_mean(n_angular, dtype):
    mixture = tuple(a.to(dtype) for a in filterlike(20 if EMULATED else 200))
    _, values = ops.find_modes(*mixture, 1, math.inf, n_angular=n_angular)
    at_means = ops.mixture_log_prob(mixture[0], *mixture, n_angular=n_angular)
    assert (values[:, 0] >= at_means.amax(-1) - (1e-12 if dtype == torch.float64 else 1e-5)).all()


def test_few_modes_are_missed():
    """Of mixtures with many modes: the best of all, by a minimiser from every mean, is nearly always the first."""
    means, log_weights, bandwidths = filterlike(25, 24)
    radii = np.array([1.0, 1.0, 0.5])
    _, values = ops.find_modes(means, log_weights, bandwidths, 3, radii.tolist(), n_angular=1)
    rows = rows_of(means, log_weights, bandwidths, 1)
    want = torch.tensor([[row.log_density(m)[0] for m in row.modes(radii)[:3]] for row in rows])
    missed = (values < want - 1e-6).double().mean(0)
    assert (values < want + 1e-6).all()
    assert missed[0] <= 0.04 and missed[2] <= 0.12


@pytest.mark.parametrize("n_angular", [0, 1])
def test_against_a_grid(n_angular):
    """In one dimension: every local maximum of 40,000 points, and none besides."""
    g = torch.Generator().manual_seed(2)
    means = 2.9 * torch.rand(20, 12, 1, generator=g, dtype=torch.float64) * torch.tensor([-1.0, 1.0]).repeat(6)[:, None]
    log_weights, bandwidths = torch.randn(20, 12, generator=g, dtype=torch.float64), torch.tensor([0.3]).double()
    modes, values = ops.find_modes(means, log_weights, bandwidths, 12, 0.0, n_angular=n_angular)
    grid = torch.linspace(-math.pi, math.pi, 40001, dtype=torch.float64)[:-1]
    density = ops.mixture_log_prob(grid[None, :, None].expand(20, -1, 1), means, log_weights, bandwidths, n_angular=n_angular)
    higher = (density > density.roll(1, -1)) & (density > density.roll(-1, -1))
    for b in range(20):
        want, got = grid[higher[b]], modes[b, values[b] > -math.inf, 0].sort().values
        assert len(got) == len(want)
        torch.testing.assert_close(got, want, rtol=0, atol=2 * math.pi / 40000)


def test_two_kernels_far_apart():
    """Each is a mode, and its density is its weight times the kernel's height."""
    means = torch.tensor([[[0.0, 0.0, 3.0], [50.0, -20.0, -3.0]]], dtype=torch.float64)
    weights, bandwidths = torch.tensor([[0.3, 0.7]], dtype=torch.float64), torch.tensor([0.5, 2.0, 0.3], dtype=torch.float64)
    modes, values = ops.find_modes(means, weights.log(), bandwidths, 4, 1.0, n_angular=1)
    torch.testing.assert_close(modes[0, :2], means[0].flip(0), rtol=0, atol=1e-12)
    height = -math.log(2 * math.pi * 0.5 * 2.0) - math.log(2 * math.pi * special.i0e(0.3**-2))
    torch.testing.assert_close(
        values[0], torch.tensor([math.log(0.7) + height, math.log(0.3) + height, -math.inf, -math.inf]).double()
    )
    assert torch.equal(modes[0, 2:], modes[0, :1].expand(2, 3))


def test_two_kernels_near_each_other():
    """Two equal kernels are one mode up to two bandwidths apart, two beyond; the seam is between them."""

    def find(apart):
        means = torch.tensor([[[math.pi - apart / 2], [-math.pi + apart / 2]]], dtype=torch.float64)
        return ops.find_modes(means, torch.zeros(1, 2).double(), torch.tensor([0.05]).double(), 2, 0.0, n_angular=1)

    modes, values = find(0.095)
    assert values[0, 1] == -math.inf and math.pi - modes[0, 0, 0].abs() < 1e-9
    modes, values = find(0.11)
    assert values[0, 1] == pytest.approx(values[0, 0].item(), abs=1e-12)
    assert modes.sum().abs() < 1e-9 and 0.02 < math.pi - modes[0, 0, 0].abs() < 0.055


def test_a_saddle_is_no_mode():
    """The mean of a light kernel amid two heavy ones, where all slopes are 0 by symmetry."""
    means = torch.tensor([[[0.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    log_weights, bandwidths = torch.tensor([[-9.0, 0.0, 0.0]], dtype=torch.float64), torch.full((2,), 0.4).double()
    modes, values = ops.find_modes(means, log_weights, bandwidths, 3, 0.0)
    assert values[0, 1] > -math.inf and values[0, 2] == -math.inf
    assert (modes[0, :2, 0].abs() > 0.9).all()


def test_an_infinite_bandwidth_is_uniform():
    means, log_weights, bandwidths = filterlike(5, 20)
    bandwidths = torch.tensor([0.7, 0.7, math.inf], dtype=torch.float64)
    modes, values = ops.find_modes(means, log_weights, bandwidths, 3, 1.0, n_angular=1)
    plane, want = ops.find_modes(means[..., :2], log_weights, bandwidths[:2], 3, 1.0)
    torch.testing.assert_close(modes[..., :2], plane, rtol=0, atol=1e-8)
    torch.testing.assert_close(values, want - math.log(2 * math.pi))
    assert (modes[..., 2].abs() <= math.pi).all()
    _, values = ops.find_modes(means[..., 2:], log_weights, bandwidths[2:], 3, 0.1, n_angular=1)
    torch.testing.assert_close(values[:, 0], torch.full((5,), -math.log(2 * math.pi)).double())
    assert (values[:, 1:] == -math.inf).all()


def test_a_spoiled_row_is_alone():
    means, log_weights, bandwidths = filterlike(3, 20)
    want = ops.find_modes(means, log_weights, bandwidths, 3, 1.0, n_angular=1)
    for value in (math.nan, math.inf):
        for which in (0, 1):
            spoiled = [means.clone(), log_weights.clone()]
            spoiled[which][1, 4] = value
            got = ops.find_modes(*spoiled, bandwidths, 3, 1.0, n_angular=1)
            for g, w in zip(got, want):
                assert torch.equal(g[[0, 2]], w[[0, 2]]) and g[1].isnan().all()


@pytest.mark.parametrize("width", [1e-4, 1e-2, 1e3])
def test_narrow_and_broad_kernels(width):
    """From single kernels to one: no loop without end, nothing but numbers."""
    means, log_weights, _ = filterlike(4, 50)
    for dtype in (torch.float32, torch.float64):
        mixture = means.to(dtype), log_weights.to(dtype), torch.full((3,), width, dtype=dtype)
        modes, values = ops.find_modes(*mixture, 2, 0.0, n_angular=1)
        assert modes.isfinite().all() and values[:, 0].isfinite().all()
        if width < 1e-3:
            best = log_weights.topk(2).indices[..., None].expand(-1, -1, 3)
            torch.testing.assert_close(
                mdps.StateSpace(("x", "y"), ("a",)).difference(modes, mixture[0].gather(1, best)),
                torch.zeros_like(modes),
                rtol=0,
                atol=1e-6,
            )
        if width > 1:
            mean = (log_weights.exp()[..., None] * means).sum(1)
            torch.testing.assert_close(modes[:, 0, :2].double(), mean[:, :2], rtol=0, atol=1e-2)


def test_no_gradient():
    args = tuple(a.requires_grad_() for a in filterlike(2, 5))
    modes, values = ops.find_modes(*args, 1, 1.0, n_angular=1)
    assert not modes.requires_grad and not values.requires_grad
    assert torch.equal(torch.autograd.grad((modes.sum() + args[0]).sum(), args[0])[0], torch.ones_like(args[0]))


def test_no_rows():
    modes, values = ops.find_modes(torch.zeros(0, 5, 2), torch.zeros(0, 5), torch.ones(2), 3, 1.0)
    assert modes.shape == (0, 3, 2) and values.shape == (0, 3)


M, W, S = torch.zeros(2, 4, 3), torch.zeros(2, 4), torch.ones(3)
test_errors = check_errors(
    [
        (lambda: ops.find_modes(M, W, S, 0, 1.0), ValueError, "n_modes: expected 1 to 2"),
        (lambda: ops.find_modes(M, W, S, 2.0, 1.0), TypeError, "n_modes: expected an int, got 2.0"),
        (
            lambda: ops.find_modes(M, W, S, 2, (1.0, 2.0)),
            ValueError,
            r"radii: expected 3 numbers >= 0, or one, got \(1.0, 2.0\)",
        ),
        (lambda: ops.find_modes(M, W, S, 2, -1.0), ValueError, "radii: expected 3 numbers >= 0"),
        (lambda: ops.find_modes(M, W, S, 2, math.nan), ValueError, "radii: expected 3 numbers >= 0"),
        (lambda: ops.find_modes(M, W, S, 2, 1.0, n_angular=4), ValueError, "n_angular: expected 0 to 3"),
        (lambda: ops.find_modes(M, W[:1], S, 2, 1.0), ValueError, r"log_weights: expected shape \(..., N\) = \(2, 4\)"),
        (lambda: ops.find_modes(M, W, S[:2], 2, 1.0), ValueError, r"bandwidths: expected shape \(D\) or"),
        (lambda: ops.find_modes(M[:, :0], W[:, :0], S, 2, 1.0), ValueError, "means: expected shape .* with N >= 1"),
        (lambda: ops.find_modes(M, W.double(), S, 2, 1.0), TypeError, "log_weights: expected the dtype of means"),
        (lambda: torch.ops.mdps.find_modes(M, W, S, 2, [1.0], 0), RuntimeError, "radii: expected 3 numbers, got 1"),
        (
            lambda: torch.ops.mdps.find_modes(M, W, S, 2, [1.0, -1.0, 1.0], 0),
            RuntimeError,
            "radii: expected numbers >= 0, got -1",
        ),
        (lambda: torch.ops.mdps.find_modes(M, W, S, 0, [1.0] * 3, 0), RuntimeError, "n_modes: expected at least 1, got 0"),
    ]
)


@pytest.mark.skipif(mdps.build_info()["emulated"], reason="a GPU is not waited for")
def test_bandwidths_are_refused():
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bandwidths: expected positive finite numbers"):
            ops.find_modes(M, W, torch.tensor([1.0, 1.0, wrong]), 2, 1.0, n_angular=1)
    with pytest.raises(ValueError, match="bandwidths: expected positive finite numbers"):
        ops.find_modes(M, W, torch.tensor([1.0, math.inf, 1.0]), 2, 1.0, n_angular=1)
