"""mixture_log_prob against what a user could write: eager as one writes it first, and torch.compile with clamped exponents.

Float32, 2 linear dimensions and an angle, a 20 m box with bandwidths of 0.7 m and 0.2 rad: most pairs underflow, as a filter's
do. torch.compile + clamp is the strongest form known (torch.exp is 75 times slower where it underflows). Large problems are
cut into chunks of 250 queries, which is what makes both baselines fastest there. The port limit counts 18 (forward) and 33
(backward) vector instructions per 16 pairs on the two ports that add and multiply, at the rate measured in the same run.
"""

import ctypes
import math
import subprocess
import tempfile
from pathlib import Path

import torch

from bench.timing import interleaved
from mdps import ops

SIZES = [(32, 50, 50), (64, 50, 50), (1600, 100, 50), (32, 100, 50), (1, 250, 250), (8, 1000, 1000), (1, 10000, 10000)]
CHUNK = 250
PEAK = r"""
#define R8(x) x x x x x x x x
#define F(r, n) "vfmadd231ps %%" r "0,%%" r "1,%%" r #n "\n\t"
#define ALL(r) F(r, 4) F(r, 5) F(r, 6) F(r, 7) F(r, 8) F(r, 9) F(r, 10) F(r, 11) F(r, 12) F(r, 13) F(r, 14) F(r, 15)
long peak(long n) {
    for (long i = 0; i < n; i++) __asm__ volatile(ALL(REGISTERS)::: "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                                                  "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    __asm__ volatile("vzeroupper");
    return n * 12;
}
"""


def first_form(x, means, log_weights, bandwidths):
    """As one writes it first, with torch.distributions' formulas spelled out."""
    delta = x[:, :, None] - means[:, None]
    z = delta[..., :2] / bandwidths[:2]
    kappa = bandwidths[2] ** -2
    log_kernel = -0.5 * (z**2).sum(-1) - bandwidths[:2].log().sum() - math.log(2 * math.pi)
    log_kernel = log_kernel + kappa * torch.cos(delta[..., 2]) - torch.log(2 * math.pi * torch.special.i0e(kappa)) - kappa
    return torch.logsumexp(log_weights[:, None] + log_kernel, -1)


def clamped_form(x, means, log_weights, bandwidths):
    """The same with a logsumexp whose exponents are clamped."""
    delta = x[:, :, None] - means[:, None]
    z = delta[..., :2] / bandwidths[:2]
    kappa = bandwidths[2] ** -2
    log_kernel = -0.5 * (z**2).sum(-1) - bandwidths[:2].log().sum() - math.log(2 * math.pi)
    log_kernel = log_kernel + kappa * torch.cos(delta[..., 2]) - torch.log(2 * math.pi * torch.special.i0e(kappa)) - kappa
    a = log_weights[:, None] + log_kernel
    top = a.detach().amax(-1, keepdim=True)
    return (a - top).clamp_min(-80).exp().sum(-1).log() + top.squeeze(-1)


def ours(x, means, log_weights, bandwidths):
    return ops.mixture_log_prob(x, means, log_weights, bandwidths, n_angular=1)


def in_chunks(f, chunk):
    def run(x, *mixture):
        return torch.cat([f(c, *mixture) for c in x.split(chunk, 1)], 1) if x.size(1) > 4 * chunk else f(x, *mixture)

    return run


def fma_rate():
    """Vector multiply-adds per second, and lanes each, of the widest vectors here."""
    wide = "avx512f" in Path("/proc/cpuinfo").read_text()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(PEAK.replace("REGISTERS", '"zmm"' if wide else '"ymm"'))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        peak = ctypes.CDLL(str(library)).peak
        peak.argtypes, peak.restype = [ctypes.c_long], ctypes.c_long
        return (lambda: peak(200_000)), 12 * 200_000, 16 if wide else 8


def row(name, size, pairs, times, limit, others):
    """One line: ours in ms and Gpair/s, its share of the port limit, the others in ms and as ratios."""
    rate = pairs / times["mdps"]
    share = f"{rate / limit:8.2f}" if limit else " " * 8
    line = f"{size:>20} {name:>8} {times['mdps'] * 1e3:10.3f} {rate / 1e9:8.2f} {share}"
    for k in others:
        line += f" {times[k] * 1e3:10.3f} {times[k] / times['mdps']:7.1f}x"
    print(line, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    peak, peak_count, lanes = fma_rate()
    print(
        "mixture_log_prob, float32, one thread: milliseconds, share of the port limit, and how many times as long others take"
    )
    print(f"{'B x M x N':>20} {'':>8} {'mdps':>10} {'Gpair/s':>8} {'of limit':>8} {'compile+clamp':>19} {'eager':>19}")
    for b, m, n in SIZES:
        g = torch.Generator().manual_seed(0)
        args = [torch.rand(b, m, 3, generator=g) * 20, torch.rand(b, n, 3, generator=g) * 20, torch.full((b, n), -math.log(n))]
        args.append(torch.tensor([0.7, 0.7, 0.2]))
        wanted = [a.clone().requires_grad_() for a in args]
        torch._dynamo.reset()
        compiled = torch.compile(clamped_form, dynamic=False)
        forms = {"mdps": ours, "compiled": in_chunks(compiled, CHUNK), "eager": in_chunks(first_form, CHUNK)}
        grad, log2_sum = torch.ones(b, m), torch.ops.mdps.mixture_log_prob(*args, 1)[1]
        pairs, size = b * m * n, f"{b} x {m} x {n}"
        rounds = 15 if pairs < 1e7 else 3

        def backward():
            return torch.ops.mdps.mixture_log_prob_backward(grad, *args, log2_sum, 1)

        with torch.no_grad():
            forward = interleaved({k: (lambda f=f: f(*args)) for k, f in forms.items()} | {"peak": peak}, rounds)
            alone = interleaved({"mdps": backward, "peak": peak}, 15)
        both = interleaved({k: (lambda f=f: torch.autograd.grad(f(*wanted), wanted, grad)) for k, f in forms.items()}, rounds)
        row("forward", size, pairs, forward, peak_count / forward["peak"] * lanes / 18, ["compiled", "eager"])
        row("backward", size, pairs, alone, peak_count / alone["peak"] * lanes / 33, [])
        row("both", size, pairs, both, None, ["compiled", "eager"])


if __name__ == "__main__":
    main()
