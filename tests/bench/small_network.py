"""nn.Sequential against small_network on the networks of the bearings-only task: microseconds a call on one thread.

    python tests/bench/small_network.py [particles ...]

Prints, for each network and number of particles (50 a row), the shortest call of interleaved rounds and the ratios. Forward
runs without gradients; both ways asks for the gradients of all inputs and parameters, of the flat weights in the operator's
case ("+ flatten": of the module's parameters, flattened anew for every call).
"""

import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from mdps import ops

Job = Callable[[], object]


def perceptron(*widths: int, last: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, and behind the last one too where `last` says so."""
    modules: list[nn.Module] = []
    for i, (columns, out) in enumerate(pairwise(widths)):
        modules += [nn.Linear(columns, out)] + ([nn.ReLU()] if last or i < len(widths) - 2 else [])
    return nn.Sequential(*modules)


# first network, second network, columns of x, extra and condition; the second reads torch.cat([first(x), extra, condition])
NETWORKS = {
    "a dynamics": (perceptron(2, 8, 8, 8, 8), perceptron(12, 8, 8, 8, 4), 2, 4, 0),
    "b measurement": (perceptron(4, 8, 8, 8, last=True), perceptron(16, 8, 8, 1), 4, 0, 8),
    "c smoother": (perceptron(4, 8, 8, 8, 8, last=True), perceptron(18, 8, 8, 8, 1), 4, 2, 8),
}


def in_torch(first: nn.Module, second: nn.Module, x: Tensor, extra: Tensor | None, condition: Tensor | None) -> Tensor:
    joined = [first(x)]
    if extra is not None:
        joined.append(extra)
    if condition is not None:
        joined.append(condition[:, None].expand(-1, x.size(1), -1))
    return second(torch.cat(joined, -1))


def shortest(jobs: dict[str, Job], seconds: float = 1.5) -> dict[str, float]:
    """Run the jobs by turns; the shortest mean of a turn of each, in microseconds."""
    best = dict.fromkeys(jobs, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, job in jobs.items():
            calls = max(1, min(20, int(2e-3 / best[name])))
            start = time.perf_counter()
            for _ in range(calls):
                job()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    return {name: 1e6 * t for name, t in best.items()}


def jobs_of(name: str, particles: int) -> dict[str, Job]:
    first, second, n_x, n_extra, n_condition = NETWORKS[name]
    rows = particles // 50
    x = torch.randn(rows, 50, n_x, requires_grad=True)
    extra = torch.randn(rows, 50, n_extra, requires_grad=True) if n_extra else None
    condition = torch.randn(rows, n_condition, requires_grad=True) if n_condition else None
    inputs = [t for t in (x, extra, condition) if t is not None]
    layers = ops.layers_of(first) + ops.layers_of(second, extra=n_extra > 0, condition=n_condition > 0)
    weights = ops.flatten_parameters(first, second).detach().requires_grad_()
    wanted = inputs + [*first.parameters(), *second.parameters()]

    def plain() -> Tensor:
        return in_torch(first, second, x, extra, condition)

    def ours(w: Tensor) -> Tensor:
        return ops.small_network(x, w, layers, extra=extra, condition=condition)

    grad_y = torch.randn_like(plain())
    torch.testing.assert_close(ours(weights), plain())
    return {
        "torch forward": torch.no_grad()(plain),
        "forward": torch.no_grad()(lambda: ours(weights)),
        "torch both ways": lambda: torch.autograd.grad(plain(), wanted, grad_y),
        "both ways": lambda: torch.autograd.grad(ours(weights), [*inputs, weights], grad_y),
        "+ flatten": lambda: torch.autograd.grad(ours(ops.flatten_parameters(first, second)), wanted, grad_y),
    }


def main(sizes: list[int]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, float32, one thread, microseconds")
    ours = f"{'mdps':>9}{'ratio':>7}"
    print(f"{'network':15}{'n':>8}{'forward: torch':>16}{ours}{'both ways: torch':>18}{ours}{'+ flatten':>11}")
    for name in NETWORKS:
        for particles in sizes:
            t = shortest(jobs_of(name, particles))
            forward, both = t["torch forward"] / t["forward"], t["torch both ways"] / t["both ways"]
            print(
                f"{name:15}{particles:8}{t['torch forward']:16.1f}{t['forward']:9.1f}{forward:7.1f}"
                f"{t['torch both ways']:18.1f}{t['both ways']:9.1f}{both:7.1f}{t['+ flatten']:11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [1600])
