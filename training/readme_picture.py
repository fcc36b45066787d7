"""Draws training/readme_picture.png, the picture of the README: python training/readme_picture.py (ten seconds on one core).

A vehicle drives one metre a step with a wandering heading. A radar sees its bearing, except in the middle of the path. Filters
and smoother know the true models, so nothing is trained: what they differ in is which observations they use.
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

import mdps
from mdps import ops

SPACE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
N, M, T = 10_000, 2000, 33
"""Particles of a filter, of the smoother; time steps."""
TURN, BEARING_NOISE = 0.12, 0.06
"""Standard deviations, radians: of the change of heading in a step, of a bearing."""
UNSEEN = slice(10, 23)
SHOWN = (4, 10, 16, 22, 28)
SEED = 3
COLOURS = {"forward filter": "#0072B2", "backward filter": "#D55E00", "smoother": "#009E73"}
STYLE = {"font.size": 8, "axes.titlesize": 9, "legend.frameon": False, "figure.constrained_layout.use": True}
X, Y = (-17.0, 19.0), (-3.0, 20.0)


class Motion:
    """One metre a step, forward or back, with a heading that wanders."""

    noise_size = 1

    def __init__(self, direction: int) -> None:
        self.direction = direction

    def __call__(self, particles: Tensor, noise: Tensor, action: None = None) -> Tensor:
        x, y, heading = particles.unbind(-1)
        turned = heading + TURN * noise[..., 0]
        way = turned if self.direction > 0 else heading  # going back undoes the move first, then the turn
        return torch.stack([x + self.direction * way.cos(), y + self.direction * way.sin(), turned], -1)


def bearing_likelihood(particles: Tensor, bearing: Tensor) -> Tensor:
    """log p(bearing | particle) up to a constant: von Mises; bearing (B, 2) is a unit vector, or 0 where there is none."""
    seen = torch.nn.functional.normalize(particles[..., :2], dim=-1)
    return BEARING_NOISE**-2 * (seen * bearing[:, None]).sum(-1)


def smoother_weight(particles: Tensor, bearing: Tensor, log_forward: Tensor, log_backward: Tensor) -> Tensor:
    """log p(y | x) + log m_f + log m_b: exact up to a constant, where all places are equally likely beforehand."""
    return bearing_likelihood(particles, bearing) + log_forward + log_backward


def drive(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A path (1, T, 3) and its bearings as unit vectors, (1, T, 2)."""
    heading = 0.2 + TURN * torch.randn(T, generator=generator).cumsum(0)
    position = torch.tensor([-15.0, 6.0]) + torch.stack([heading.cos(), heading.sin()], -1).cumsum(0)
    bearing = torch.atan2(position[:, 1], position[:, 0]) + BEARING_NOISE * torch.randn(T, generator=generator)
    return SPACE.wrap(torch.cat([position, heading[:, None]], -1))[None], torch.stack([bearing.cos(), bearing.sin()], -1)[None]


def beliefs_of(truth: Tensor, bearings: Tensor, observed: Tensor) -> dict[str, mdps.Mixture]:
    """What both filters and the smoother believe, each a mixture of batch shape (1, T)."""
    widths = {"posterior_bandwidth": (0.5, 0.5, 0.1), "resampling_bandwidth": (0.05, 0.05, 0.02)}
    filters = [
        mdps.MixtureDensityParticleFilter(SPACE, Motion(d), bearing_likelihood, N, reverse=d < 0, **widths) for d in (1, -1)
    ]
    smoother = mdps.MixtureDensityParticleSmoother(
        *filters, smoother_weight, n_particles=M, posterior_bandwidth=widths["posterior_bandwidth"]
    )
    seed = torch.tensor(SEED)
    near, far = ops.split_seed(seed, 2, stream=1).unbind()
    initial = truth[:, :1] + 0.3 * ops.philox_normal(near, (1, N, 3)) * torch.tensor([1.0, 1.0, 0.3])
    low, high = torch.tensor([[X[0], Y[0], -math.pi], [X[1], Y[1], math.pi]])
    final = low + (high - low) * ops.philox_uniform(far, (1, N, 3))
    with torch.no_grad():
        b = smoother(bearings, initial, final, observed=observed, seed=seed)
    return dict(zip(COLOURS, (b.forward.posterior, b.backward.posterior, b.smoothed)))


def draw(truth: Tensor, beliefs: dict[str, mdps.Mixture]) -> plt.Figure:
    """One panel for each belief: the path, and the density of the position at a few times."""
    x, y = truth[0, :, 0], truth[0, :, 1]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(7.2, 1.95), sharex=True, sharey=True)
        for ax, (name, belief) in zip(axes, beliefs.items()):
            error = torch.hypot(*(belief.mean[0] - truth[0])[:, :2].T).mean().item()
            ax.set_title(f"{name}: mean error {error:.1f} m", color=COLOURS[name])
            for t in SHOWN:
                density(ax, belief, t, COLOURS[name])
            ax.plot(x, y, color="black", lw=0.8)
            ax.plot(x[UNSEEN], y[UNSEEN], color="white", lw=0.8, ls=(0, (2, 2)))
            ax.plot(x[list(SHOWN)], y[list(SHOWN)], "o", color="black", ms=2.5)
            ax.plot(0, 0, "^", color="black", ms=5)
            ax.set(xlim=X, ylim=Y, aspect="equal", xticks=[], yticks=[])
            for side in ax.spines.values():
                side.set(color="0.7", linewidth=0.6)
        handles = [
            plt.Line2D([], [], color="black", lw=0.8, marker="o", ms=2.5, label="true path"),
            plt.Line2D([], [], color="black", lw=0.8, ls=(0, (2, 2)), label="not observed"),
            plt.Line2D([], [], color="black", marker="^", ls="", ms=5, label="radar (bearings only)"),
            plt.Line2D([], [], color="0.5", marker="o", ls="", ms=7, alpha=0.6, mec="none", label="belief at the dots"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def density(ax: plt.Axes, belief: mdps.Mixture, t: int, colour: str) -> None:
    """Shade the density of the position at time t, each time on its own scale."""
    xs, ys = torch.linspace(*X, 217), torch.linspace(*Y, 145)
    at = mdps.Mixture(belief.means[0, t], belief.log_weights[0, t], belief.bandwidths, SPACE).marginal(("x", "y"))
    values = at.log_prob_many(torch.cartesian_prod(xs, ys)).exp().view(len(xs), len(ys)).T
    cloud = LinearSegmentedColormap.from_list("cloud", [(1, 1, 1, 0), (*matplotlib.colors.to_rgb(colour), 0.9)])
    ax.imshow(values.sqrt().numpy(), origin="lower", extent=X + Y, cmap=cloud, vmin=0, interpolation="bilinear")


def main() -> None:
    truth, bearings = drive(torch.Generator().manual_seed(SEED))
    observed = torch.ones(1, T, dtype=torch.bool)
    observed[:, UNSEEN] = False
    figure = draw(truth, beliefs_of(truth, bearings, observed))
    path = Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=200, bbox_inches="tight")
    print(path)


if __name__ == "__main__":
    main()
