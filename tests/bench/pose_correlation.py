"""Scores of poses in a map on one thread: `python tests/bench pose_correlation`.

8 channels, a template of 64 x 129 cells of which those within 90 degrees are valid (4224), poses around the middle of the map
with a standard deviation of 20 pixels. Beside ours, in interleaved rounds, PyTorch's grid_sample in two forms: "best", samples
of valid cells alone and a matrix-vector product, on the better of two memory layouts of the map; and "stacked", as one writes
it, where patches of all cells are sampled, multiplied with the template and summed. Backward is to poses and template, with a
frozen map; the last column has the map's gradient as well, which on a large map is mostly zeros to be written.

Memory: what a process grows by at its peak, forward and backward with a frozen map, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import interleaved
from mdps import ops

C, H, W = 8, 64, 129
ORIGIN = (64.0, 64.0)
SIZES = [(n, size) for size in (256, 2456) for n in (250, 1000)]


def problem(n: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map (channels last), template, poses, valid."""
    g = torch.Generator().manual_seed(0)
    of_map = torch.randn(size, size, C, generator=g).permute(2, 0, 1)
    y, x = torch.meshgrid(torch.arange(H) - ORIGIN[1], torch.arange(W) - ORIGIN[0], indexing="ij")
    valid = x.abs() <= -y
    template = torch.randn(C, H, W, generator=g) * valid / valid.sum()
    poses = torch.cat([size / 2 + 20 * torch.randn(n, 2, generator=g), 6.2 * torch.rand(n, 1, generator=g) - 3.1], 1)
    return of_map, template, poses, valid


def ours(of_map: Tensor, template: Tensor, poses: Tensor, valid: Tensor) -> Tensor:
    return ops.pose_correlation(of_map, template, poses, valid, origin=ORIGIN)


def grid(poses: Tensor, x: Tensor, y: Tensor, size: int) -> Tensor:
    u, v, theta = poses[:, :, None].unbind(1)
    at = torch.stack([u + theta.cos() * x - theta.sin() * y, v + theta.sin() * x + theta.cos() * y], -1)
    return (at * (2 / (size - 1)) - 1)[None]


def best(of_map: Tensor, template: Tensor, poses: Tensor, valid: Tensor) -> Tensor:
    i, j = valid.nonzero(as_tuple=True)
    at = grid(poses, j - ORIGIN[0], i - ORIGIN[1], of_map.size(-1))
    return (F.grid_sample(of_map[None], at, align_corners=True)[0] @ template[:, i, j, None]).sum((0, 2))


def stacked(of_map: Tensor, template: Tensor, poses: Tensor, valid: Tensor) -> Tensor:
    i, j = torch.ones_like(valid).nonzero(as_tuple=True)
    at = grid(poses, j - ORIGIN[0], i - ORIGIN[1], of_map.size(-1))
    patches = F.grid_sample(of_map[None], at, align_corners=True)[0]
    return (patches * (template * valid).flatten(1).unsqueeze(1)).sum((0, 2))


FORMS = {"mdps": ours, "best": best, "stacked": stacked}


def both(f, of_map: Tensor, template: Tensor, poses: Tensor, valid: Tensor, with_map: bool = False) -> tuple[Tensor, ...]:
    wanted = [a.detach().requires_grad_() for a in ((template, poses, of_map) if with_map else (template, poses))]
    return torch.autograd.grad(f(wanted[2] if with_map else of_map, *wanted[:2], valid).sum(), wanted)


def row(n: int, size: int) -> str:
    args = problem(n, size)
    plain = args[0].contiguous(), *args[1:]
    layouts = {"mdps": ("mdps", args), "best": ("best", args), "best, plain": ("best", plain), "stacked": ("stacked", args)}
    layouts["stacked, plain"] = "stacked", plain
    jobs = {}
    for name, (form, given) in layouts.items():
        f = FORMS[form]
        jobs[name] = lambda f=f, given=given: f(*given)
        jobs[f"{name}, both"] = lambda f=f, given=given: both(f, *given)
        if form != "stacked":
            jobs[f"{name}, map"] = lambda f=f, given=given: both(f, *given, with_map=True)
    distance = (ours(*args) - best(*args)).abs().max() / best(*args).abs().max()
    t = interleaved(jobs, rounds=12 if n < 1000 else 5)

    def ratios(way: str) -> tuple[float, ...]:
        others = (min(t.get(f"{form}{x}{way}", torch.inf) for x in ("", ", plain")) for form in ("best", "stacked"))
        return tuple(other / t[f"mdps{way}"] for other in others)

    (best_forward, stacked_forward), (best_both, stacked_both), (best_map, _) = (ratios(w) for w in ("", ", both", ", map"))
    return (
        f"N {n:4}, map {size:4}^2: forward {1e3 * t['mdps']:6.2f} ms, x {best_forward:5.1f} best, x {stacked_forward:5.1f} "
        f"stacked; with backward {1e3 * t['mdps, both']:6.2f} ms, x {best_both:5.1f} best, x {stacked_both:5.1f} stacked; with "
        f"the map's {1e3 * t['mdps, map']:6.1f} ms, x {best_map:4.1f} best; furthest apart {distance:.1e}"
    )


def status(field: str) -> float:
    """MB of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) / 1024


def memory(form: str, n: int) -> float:
    """MB that the process grows by at its peak; a first call on two poses brings in what every call needs."""
    args, few = problem(n, 256), problem(2, 256)
    both(FORMS[form], *few)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    both(FORMS[form], *args)
    return status("VmHWM") - before


def in_own_process(form: str, n: int) -> float:
    """What is freed goes back to the system at once, so that no call hides in what an earlier one left."""
    command = [sys.executable, "-m", "bench.pose_correlation", form, str(n)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, text=True, capture_output=True, check=True)
    return float(done.stdout)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(memory(sys.argv[1], int(sys.argv[2])))
        return
    print("pose_correlation, float32, one thread; x: how many times faster than grid_sample")
    for n, size in SIZES:
        print(row(n, size), flush=True)
    for n in (250, 1000):
        used = {form: in_own_process(form, n) for form in FORMS}
        print(
            f"N {n:4}: memory {used['mdps']:.2f} MB; best {used['best']:.0f} MB, x {used['best'] / used['mdps']:.0f}; stacked "
            f"{used['stacked']:.0f} MB, x {used['stacked'] / used['mdps']:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
