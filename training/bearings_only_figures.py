"""Figures of a bearings-only run: trajectories with all beliefs, learning curves, likelihood over time."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from staged import mix, on_cpu
from torch import Tensor

from mdps import Mixture, metrics
from mdps.bearings_only import ARENA, RADAR

TITLES = {"forward": "forward filter", "backward": "backward filter", "smoothed": "smoother"}
COLOURS = {"forward": "#0072B2", "backward": "#D55E00", "smoothed": "#009E73"}
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "legend.frameon": False, "savefig.dpi": 200, "savefig.bbox": "tight",
    "figure.constrained_layout.use": True,
}  # fmt: skip
EXTENT = ARENA + 1.5


def draw_run(
    folder: Path, history: list[dict[str, Any]], tracker: torch.nn.Module, sequences: tuple[Tensor, Tensor], seed: int
) -> None:
    """Draw every figure of a run into folder/figures, as PNG and PDF."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    states, observations = (s[:200] for s in sequences)
    place = next(tracker.parameters()).device
    with torch.no_grad():
        found = tracker.beliefs(states.to(place), observations.to(place), mix(seed, 8))
    beliefs = {name: on_cpu(belief) for name, belief in found.items()}
    drawn = {"likelihood_over_time": likelihood_over_time(beliefs, states)}
    for i in range(min(2, len(states))):
        drawn[f"trajectory_{i + 1}"] = trajectory(beliefs, states, observations, i)
    if history:
        drawn["learning_curves"] = learning_curves(history)
    for name, figure in drawn.items():
        with plt.rc_context(STYLE):
            figure.savefig(folder / "figures" / f"{name}.png")
            figure.savefig(folder / "figures" / f"{name}.pdf")
        plt.close(figure)


def trajectory(beliefs: dict[str, Mixture], states: Tensor, observations: Tensor, index: int, n_times: int = 4) -> plt.Figure:
    """One sequence at a few times (columns) as the beliefs (rows) see it: true path, bearing, density, particles."""
    n_steps = states.size(1)
    times = sorted({min(round((k + 0.5) / n_times * n_steps), n_steps - 1) for k in range(n_times)})
    n_times = len(times)  # fewer where there are not so many steps
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(beliefs), n_times, figsize=(1.75 * n_times, 1.8 * len(beliefs)), squeeze=False, sharex=True, sharey=True
        )
        for row, (name, belief) in zip(axes, beliefs.items()):
            row[0].set_ylabel(TITLES[name], color=COLOURS[name], fontsize=9)
            for ax, t in zip(row, times):
                at = Mixture(belief.means[index, t], belief.log_weights[index, t], belief.bandwidths, belief.space)
                _scene(ax, states[index], t, observations[index, t].item())
                _belief(ax, at, COLOURS[name])
        for ax, t in zip(axes[0], times):
            ax.set_title(f"step {t + 1} of {n_steps}")
        handles = [
            plt.Line2D([], [], color="black", lw=1.2, label="true path so far, pose"),
            plt.Line2D([], [], color="0.65", lw=0.8, label="path to come"),
            plt.Line2D([], [], color="black", marker="^", ls="", ms=4, label="radar"),
            plt.Line2D([], [], color="#CC79A7", lw=0.8, ls="--", label="bearing measured now"),
            plt.Line2D([], [], color="0.4", marker=r"$\rightarrow$", ls="", ms=7, label="particles (shade: weight), density"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.5, columnspacing=1.2)
    return figure


def learning_curves(history: list[dict[str, Any]]) -> plt.Figure:
    """Negative log-likelihood of every belief that a stage trains, against the epoch, over all stages."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(5.5, 2.6))
        for name, colour in COLOURS.items():
            for stage in sorted({row["stage"] for row in history}):
                rows = [(i + 1, row) for i, row in enumerate(history) if row["stage"] == stage and f"validation/{name}" in row]
                epochs = [i for i, _ in rows]
                ax.plot(epochs, [r[f"training/{name}"] for _, r in rows], color=colour, lw=0.7, ls=":")
                ax.plot(epochs, [r[f"validation/{name}"] for _, r in rows], color=colour, lw=1.3)
        losses = (v for row in history for k, v in row.items() if k.startswith("validation/"))
        if values := sorted(v for v in losses if math.isfinite(v)):
            ax.set_ylim(values[0] - 0.3, values[int(0.97 * (len(values) - 1))] + 0.5)
        for i in range(1, len(history)):
            if history[i]["stage"] != history[i - 1]["stage"]:
                ax.axvline(i + 0.5, color="0.7", lw=0.6)
        firsts = {row["stage"]: i for i, row in reversed(list(enumerate(history)))}
        for stage, i in firsts.items():
            ax.text(i + 0.8, 1.0, f"stage {stage}", color="0.4", va="bottom", transform=ax.get_xaxis_transform())
        ax.set_xlabel("epoch")
        ax.set_ylabel("negative log-likelihood [nats]")
        ax.set_xlim(0.5, len(history) + 0.5)
        named = [n for n in COLOURS if any(f"validation/{n}" in row for row in history)]
        handles = [plt.Line2D([], [], color=COLOURS[n], lw=1.3, label=TITLES[n]) for n in named]
        handles += [
            plt.Line2D([], [], color="0.3", lw=1.3, label="validation"),
            plt.Line2D([], [], color="0.3", lw=0.7, ls=":", label="training"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.2)
    return figure


def likelihood_over_time(beliefs: dict[str, Mixture], states: Tensor) -> plt.Figure:
    """Median and quartiles over sequences of each belief's negative log-likelihood and position error at every step."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(6.5, 2.4))
        steps = range(1, states.size(1) + 1)
        for name, belief in beliefs.items():
            values = metrics.negative_log_likelihood(belief, states), metrics.position_error(belief.mean, states)
            for ax, value in zip(axes, values):
                low, middle, high = value.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
                ax.fill_between(steps, low.numpy(), high.numpy(), color=COLOURS[name], alpha=0.15, lw=0)
                ax.plot(steps, middle.numpy(), color=COLOURS[name], lw=1.3, label=TITLES[name])
        axes[0].set_ylabel("negative log-likelihood [nats]")
        axes[1].set_ylabel("error of the mean position [m]")
        axes[1].set_ylim(bottom=0)
        for ax in axes:
            ax.set_xlabel("step")
            ax.set_xlim(1, states.size(1))
        quartiles = plt.Rectangle((0, 0), 1, 1, color="0.5", alpha=0.3, lw=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend([*handles, quartiles], [*labels, "quartiles over sequences"], loc="outside upper center", ncols=4)
    return figure


def _scene(ax, states, t, bearing):
    ax.add_patch(plt.Rectangle((-ARENA, -ARENA), 2 * ARENA, 2 * ARENA, fill=False, ec="0.6", lw=0.6))
    x, y = states[:, 0].numpy(), states[:, 1].numpy()
    ax.plot(x[t:], y[t:], color="0.65", lw=0.8, zorder=2)
    ax.plot(x[: t + 1], y[: t + 1], color="black", lw=1.2, zorder=3)
    _arrows(ax, states[t : t + 1], ["black"], length=2.0, width=0.011, zorder=6)
    ax.plot(*RADAR, "^", color="black", ms=4, zorder=5)
    ray = [(r + 3 * ARENA * d) for r, d in zip(RADAR, (math.cos(bearing), math.sin(bearing)), strict=True)]
    ax.plot([RADAR[0], ray[0]], [RADAR[1], ray[1]], color="#CC79A7", lw=0.8, ls="--", zorder=1)
    ax.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), aspect="equal", xticks=[-10, 0, 10], yticks=[-10, 0, 10])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.tick_params(length=0, labelsize=6, pad=1)


def _belief(ax, belief, colour):
    line = torch.linspace(-EXTENT, EXTENT, 121, dtype=belief.means.dtype)
    grid = torch.cartesian_prod(line, line)
    density = belief.marginal(("x", "y")).log_prob_many(grid).exp().view(121, 121).T
    cloud = LinearSegmentedColormap.from_list("cloud", [(1, 1, 1, 0), (*matplotlib.colors.to_rgb(colour), 0.75)])
    ax.imshow(
        density.sqrt().numpy(),
        origin="lower",
        extent=(-EXTENT, EXTENT) * 2,
        cmap=cloud,
        vmin=0,
        zorder=0,
        interpolation="bilinear",
    )
    weights = belief.log_weights.exp()
    opacity = (0.25 + 0.75 * weights / weights.max()).tolist()
    _arrows(ax, belief.means, [(*matplotlib.colors.to_rgb(colour), a) for a in opacity], length=1.5, width=0.008, zorder=4)


def _arrows(ax, poses, colours, length, width, zorder):
    x, y, heading = poses.unbind(-1)
    arrows = (a.numpy() for a in (x, y, length * heading.cos(), length * heading.sin()))
    options = {"angles": "xy", "scale_units": "xy", "scale": 1, "headwidth": 4, "headlength": 4, "headaxislength": 3.5}
    ax.quiver(*arrows, color=colours, width=width, zorder=zorder, **options)
