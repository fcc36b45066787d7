"""Times of resampling and of random draws on one thread: `python tests/bench/resample.py`.

The contenders take turns, and the best of all turns counts, so that a busy machine disturbs the ratios little. All start from
log-weights. torch: softmax, cumsum and searchsorted on float32 rows. particles: its own exp_and_normalise and numba resampling,
row by row in float64 (pip install particles); a second column gives it normalised weights for free.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from mdps import ops

SIZES = [(1, 50), (32, 50), (32, 1000), (32, 10_000), (32, 100_000)]


def torch_resample(log_weights: Tensor, scheme: str) -> Tensor:
    """What one writes in torch without a custom operator."""
    b, n = log_weights.shape
    if scheme == "multinomial":
        return torch.multinomial(log_weights.softmax(-1), n, replacement=True)
    cumulative = log_weights.softmax(-1).cumsum(-1)
    cumulative = cumulative / cumulative[:, -1:]
    u = torch.rand(b, n if scheme == "stratified" else 1)
    return torch.searchsorted(cumulative, (torch.arange(n) + u) / n, right=True).clamp_(max=n - 1)


def particles_resample() -> Callable | None:
    try:
        import particles.resampling
    except ImportError:
        return None
    return particles.resampling


def best_times(functions: list[Callable[[], object]], seconds: float = 1.5) -> list[float]:
    """Seconds a call: the best of turns that last `seconds` in all, at least 5."""
    repeats = []
    for f in functions:
        f()
        start = time.perf_counter()
        f()
        repeats.append(max(1, int(1e-3 / (time.perf_counter() - start + 1e-9))))
    best, turns, end = [float("inf")] * len(functions), 0, time.perf_counter() + seconds
    while turns < 5 or time.perf_counter() < end:
        for i, (f, n) in enumerate(zip(functions, repeats)):
            start = time.perf_counter()
            for _ in range(n):
                f()
            best[i] = min(best[i], (time.perf_counter() - start) / n)
        turns += 1
    return best


def resampling_row(scheme: str, b: int, n: int) -> list[float]:
    """Seconds a call of mdps, torch, particles, and particles with the weights given; NaN for what there is not."""
    x, seed = 2 * torch.randn(b, n, generator=torch.Generator().manual_seed(0)), ops.make_seed()
    functions = {"mdps": lambda: ops.resample(x, seed, scheme=scheme)}
    if scheme != "residual":
        functions["torch"] = lambda: torch_resample(x, scheme)
    if library := particles_resample():
        logs, f = x.double().numpy(), getattr(library, scheme)
        weights = [library.exp_and_normalise(row) for row in logs]
        functions["particles"] = lambda: [f(library.exp_and_normalise(row)) for row in logs]
        functions["given"] = lambda: [f(w) for w in weights]
    times = dict(zip(functions, best_times(list(functions.values()))))
    return [times.get(name, float("nan")) for name in ("mdps", "torch", "particles", "given")]


def resampling_table() -> None:
    print("Resampling, ns a draw (N = M, float32, one thread); ratios: how many times faster mdps is")
    heads = ("mdps", "torch", "particles", "x torch", "x particles", "(given)")
    print(f"{'scheme':12} {'B':>3} {'N':>7} " + " ".join(f"{h:>11}" for h in heads))
    for scheme in ("stratified", "systematic", "multinomial", "residual"):
        for b, n in SIZES:
            times = resampling_row(scheme, b, n)
            numbers = [1e9 * t / b / n for t in times[:3]] + [t / times[0] for t in times[1:]]
            print(f"{scheme:12} {b:3} {n:7} " + " ".join(f"{x:11.2f}" if x == x else f"{'-':>11}" for x in numbers), flush=True)


def torch_mixture(means: Tensor, log_weights: Tensor, bandwidths: Tensor) -> Tensor:
    """A draw of poses (x, y, angle) as one writes it in torch."""
    ancestors = torch_resample(log_weights, "stratified")
    mean = means.gather(1, ancestors.unsqueeze(-1).expand(-1, -1, means.size(-1)))
    linear = mean[..., :2] + bandwidths[:2] * torch.randn_like(mean[..., :2])
    angle = torch.distributions.VonMises(mean[..., 2:], bandwidths[2:] ** -2).sample()
    return torch.cat([linear, angle], -1)


def mixture_table() -> None:
    print("\nmixture_resample of poses (2 linear dimensions, 1 angle, float32, N = M), ns a sample")
    for b, n in SIZES[1:4]:
        means, log_weights, bandwidths = torch.randn(b, n, 3), torch.randn(b, n), torch.tensor([0.5, 0.5, 0.2])
        seed = ops.make_seed()
        ours, torchs = best_times(
            [
                lambda m=means, w=log_weights, s=bandwidths, r=seed: ops.mixture_resample(m, w, s, r, n_angular=1),
                lambda m=means, w=log_weights, s=bandwidths: torch_mixture(m, w, s),
            ]
        )
        print(f"B {b:3} N {n:7}  mdps {1e9 * ours / b / n:8.2f}  torch {1e9 * torchs / b / n:8.2f}  x {torchs / ours:.1f}")


def draws(dtype: torch.dtype, n: int = 100_000) -> dict[str, Callable[[], object]]:
    seed = ops.make_seed()
    contenders = {
        "philox_uniform": lambda: ops.philox_uniform(seed, (1, n), dtype=dtype),
        "torch.rand": lambda: torch.rand(1, n, dtype=dtype),
        "philox_normal": lambda: ops.philox_normal(seed, (1, n), dtype=dtype),
        "torch.randn": lambda: torch.randn(1, n, dtype=dtype),
    }
    for k in (0.1, 10.0, 1e4):
        concentration = torch.full((1, n), k, dtype=dtype)
        law = torch.distributions.VonMises(torch.zeros((), dtype=dtype), torch.tensor(k, dtype=dtype))
        contenders[f"philox_von_mises, k = {k:g}"] = lambda c=concentration: ops.philox_von_mises(seed, c)
        contenders[f"torch VonMises, k = {k:g}"] = lambda law=law: law.sample((n,))
    return contenders


def draws_table(n: int = 100_000) -> None:
    print("\nDraws, ns a number (one thread)")
    for dtype in (torch.float32, torch.float64):
        contenders = draws(dtype, n)
        for name, t in zip(contenders, best_times(list(contenders.values()))):
            print(f"{dtype!s:14} {name:32} {1e9 * t / n:8.2f}", flush=True)


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resampling_table()
    mixture_table()
    draws_table()
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
