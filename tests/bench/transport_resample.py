"""Optimal-transport resampling on one thread: `python tests/bench transport_resample`.

Beside ours, in interleaved rounds, the same steps as one writes them in PyTorch: batched, in the log domain, as many steps as
the slowest row of ours needs. Its gradients are those of autograd through all steps; "last" stops them before the last step,
as the released code of Corenflos et al. 2021 does: cheaper, and not the gradient of the result. Poses (x, y, heading).
"""

import torch
from torch import Tensor

from bench.timing import interleaved
from mdps import ops

EPSILON, SCALING = 0.5, 0.9
SIZES = [(32, 50), (32, 250)]


def torch_transport(particles: Tensor, log_weights: Tensor, steps: int, all_steps: bool) -> Tensor:
    """What `transport_resample` computes, on poses."""
    z = torch.cat([particles[..., :2], particles[..., 2:].cos(), particles[..., 2:].sin()], -1)
    x = z - z.mean(1, keepdim=True)
    x = x / (2 * x.std(1, correction=0, keepdim=True).amax(-1, keepdim=True))
    cost = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    log_w, n = log_weights.log_softmax(-1), log_weights.size(-1)
    f = g = torch.zeros_like(log_w)
    e = (x.amax((1, 2)) - x.amin((1, 2))).detach().square().clamp_min(EPSILON).view(-1, 1, 1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and all_steps):
        for step in range(steps):
            entries = (f.unsqueeze(2) + g.unsqueeze(1) - cost) / e
            s = (entries + log_w.unsqueeze(1)).logsumexp(2)
            r = entries.logsumexp(1) - torch.tensor(float(n)).log()
            share = e.squeeze(-1) / (2 if step else 1)
            f, g = f - share * s, g - share * r
            e = (e * SCALING**2).clamp_min(EPSILON)
    if not all_steps:
        g = -EPSILON * ((f.unsqueeze(2) - cost) / EPSILON - torch.tensor(float(n)).log()).logsumexp(1)
    mean = (log_w.unsqueeze(1) + (g.unsqueeze(1) - cost) / EPSILON).softmax(-1) @ z
    return torch.cat([mean[..., :2], torch.atan2(mean[..., 3:], mean[..., 2:3])], -1)


def both(f, *args: Tensor) -> tuple[Tensor, ...]:
    args = tuple(a.detach().requires_grad_() for a in args)
    return torch.autograd.grad(f(*args).sum(), args)


def row(b: int, n: int) -> str:
    generator = torch.Generator().manual_seed(0)
    particles = torch.randn(b, n, 3, generator=generator) * torch.tensor([3.0, 3.0, 0.5])
    log_weights = 2 * torch.randn(b, n, generator=generator)
    out = ops.transport_resample(particles, log_weights, epsilon=EPSILON, scaling=SCALING, n_angular=1)
    steps = int(out.iterations.max())
    contenders = {
        "mdps": lambda x, w: ops.transport_resample(x, w, epsilon=EPSILON, scaling=SCALING, n_angular=1).particles,
        "torch": lambda x, w: torch_transport(x, w, steps, True),
        "last": lambda x, w: torch_transport(x, w, steps, False),
    }
    distance = (contenders["torch"](particles, log_weights) - out.particles).abs().max().item()
    jobs = {name: (lambda f=f: f(particles, log_weights)) for name, f in contenders.items() if name != "last"}
    jobs |= {f"{name}, both": (lambda f=f: both(f, particles, log_weights)) for name, f in contenders.items()}
    t = interleaved(jobs)
    return (
        f"B {b} N {n:4}, {steps} steps: forward {1e3 * t['mdps']:8.3f} ms, x {t['torch'] / t['mdps']:5.1f}; with backward "
        f"{1e3 * t['mdps, both']:8.3f} ms, x {t['torch, both'] / t['mdps, both']:5.1f}, last step alone x "
        f"{t['last, both'] / t['mdps, both']:5.1f}; furthest apart {distance:.1e}"
    )


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print("transport_resample, float32, one thread; x: how many times faster than PyTorch")
    for b, n in SIZES:
        print(row(b, n), flush=True)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
