"""Trajectories on a map as the beliefs see them, as a picture or a film.

    python training/localization_panels.py FILE.npz OUT.png|OUT.mp4 [--steps 5] [--no-particles]

Everything is drawn from a small file that can be committed (`save_panel`): .npz without pickle. Poses are numbers of
`localization_scene.to_integers`, log-weights float16, images JPEGs, the map's classes as they are. The frame is that of
`mdps.localization.geometry`.

Source: the paper's figures of example trajectories. Cost: 1 to 2 s a picture, 0.2 s for each frame of
a film; in a file 15 kB for each step of beliefs that have 1000 particles together, of `FRAMES` steps less than a megabyte.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from files import whole
from localization_figures import STYLE, plt
from localization_scene import (
    MODE,
    arrow_handle,
    cloud_handle,
    draw_arrows,
    draw_cloud,
    draw_map,
    draw_scale,
    read_file,
    to_integers,
    to_poses,
)
from torch import Tensor

from mdps import Mixture
from mdps.datasets.viewer import write_film
from mdps.localization import SPACE, errors
from mdps.maps import Box, Projection, RasterMap
from mdps.maps.errors import opencv

FORMAT = "mdps localization panel 1"
TITLES = {"forward": "forward filter", "backward": "backward filter", "smoothed": "smoother"}
MARGIN = 60.0
"""Metres of map around the track; filters begin with particles this far off."""
IMAGE_HEIGHT = 128
FRAMES = 50
"""Steps at most of a file that a film is drawn from."""
COLUMNS = 5
"""Steps at most of a picture."""
PARTICLE = "#550000"


@dataclass(frozen=True, eq=False)
class Panel:
    """K steps of a trajectory of T, with what is believed at each of them."""

    title: str
    map: RasterMap
    """Around the track; its box in metres of the local frame."""
    truth: Tensor
    """(T, 3)."""
    steps: tuple[int, ...]
    images: tuple[bytes, ...]
    """K JPEGs, empty where there is no image."""
    beliefs: dict[str, Mixture]
    """By name, batch shape (K)."""
    modes: dict[str, Tensor]
    """By name, (K, 3, 3) by falling density; NaN where there are fewer."""


def evenly(n_steps: int, k: int) -> list[int]:
    """k of n steps (all, where there are fewer), the same distance apart, the last among them."""
    k = min(k, n_steps)
    return sorted({round((i + 1) * n_steps / k) - 1 for i in range(k)})


def make_panel(
    title: str,
    classes: Tensor,
    pixels_per_metre: float,
    truth: Tensor,
    images: Tensor,
    beliefs: Mapping[str, Mixture],
    steps: Sequence[int],
    observed: Tensor | None = None,
) -> Panel:
    """Cut what a panel needs from one sequence.

    Args:
        classes: of the map, uint8 (3, H, W); the frame's origin is its middle.
        truth: (T, 3). images: uint8 (T, 3, h, w). observed: bool (T); False: there is no image.
        beliefs: over poses, batch shape (T), by the names of the rows, such as those of `TITLES`.
        steps: which of the T become columns, or frames of a film: `evenly(T, FRAMES)`, `range(T)`.

    Raises:
        ValueError: batch shapes, or images that are not uint8.
    """
    n_steps = len(truth)
    for name, belief in beliefs.items():
        if belief.batch_shape != (n_steps,):
            raise ValueError(f"beliefs: expected batch shape {(n_steps,)} for {name}, got {tuple(belief.batch_shape)}")
    if images.dtype != torch.uint8 or images.shape[:2] != (n_steps, 3):
        raise ValueError(f"images: expected uint8 ({n_steps}, 3, h, w), got {images.dtype} {tuple(images.shape)}")
    height, width = classes.shape[1:]
    half = np.array([width, height]) / 2 / pixels_per_metre
    whole = RasterMap(classes.cpu().numpy(), pixels_per_metre, Box(*-half, *half), Projection(0, 0))
    at = {name: _at_steps(_plain(belief), steps) for name, belief in beliefs.items()}
    modes = {}
    for name, belief in at.items():
        poses, log_densities = errors.top_poses(belief, 3)
        modes[name] = torch.where(log_densities[..., None] > -torch.inf, poses, torch.nan)
    jpegs = tuple(b"" if observed is not None and not observed[t] else _encode(images[t].cpu().numpy()) for t in steps)
    truth = truth.detach().cpu().float()
    return Panel(title, whole.query(_region(truth.numpy(), half)), truth, tuple(steps), jpegs, at, modes)


def thin(panel: Panel, n: int) -> Panel:
    """The panel with n of its steps (all, where there are fewer), the same distance apart, the last among them."""
    kept = evenly(len(panel.steps), n)
    steps, images = (tuple(x[k] for k in kept) for x in (panel.steps, panel.images))
    beliefs = {name: _at_steps(belief, kept) for name, belief in panel.beliefs.items()}
    return replace(panel, steps=steps, images=images, beliefs=beliefs, modes={k: m[kept] for k, m in panel.modes.items()})


def save_panel(panel: Panel, path: Path) -> None:
    """Write a panel; the file's head says how."""
    arrays: dict[str, Any] = {"classes": panel.map.classes, "truth": to_integers(panel.truth)}
    for name, belief in panel.beliefs.items():
        arrays[f"means/{name}"], arrays[f"modes/{name}"] = to_integers(belief.means), to_integers(panel.modes[name])
        arrays[f"has_mode/{name}"] = panel.modes[name].isfinite().all(-1).numpy()
        arrays[f"log_weights/{name}"] = belief.log_weights.half().numpy()
        arrays[f"bandwidths/{name}"] = belief.bandwidths.float().numpy()
    box = panel.map.box
    about = {
        "format": FORMAT, "title": panel.title, "steps": panel.steps, "beliefs": list(panel.beliefs),
        "pixels_per_metre": panel.map.pixels_per_metre, "box": [box.x_min, box.y_min, box.x_max, box.y_max],
        "jpeg_bytes": [len(image) for image in panel.images],
    }  # fmt: skip
    arrays["jpegs"] = np.frombuffer(b"".join(panel.images), np.uint8)
    with whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def load_panel(path: Path) -> Panel:
    """Read what `save_panel` wrote.

    Raises:
        ValueError: another file.
    """
    about, arrays = read_file(path, FORMAT)
    ends = np.cumsum([0, *about["jpeg_bytes"]])
    jpegs = arrays["jpegs"].tobytes()
    beliefs, modes = {}, {}
    for name in about["beliefs"]:
        log_weights = torch.from_numpy(arrays[f"log_weights/{name}"]).float().log_softmax(-1)
        means, bandwidths = to_poses(arrays[f"means/{name}"]), torch.from_numpy(arrays[f"bandwidths/{name}"])
        beliefs[name] = Mixture(means, log_weights, bandwidths, SPACE)
        there = torch.from_numpy(arrays[f"has_mode/{name}"])[..., None]
        modes[name] = torch.where(there, to_poses(arrays[f"modes/{name}"]), torch.nan)
    raster = RasterMap(arrays["classes"], about["pixels_per_metre"], Box(*about["box"]), Projection(0, 0))
    images = tuple(jpegs[a:b] for a, b in pairwise(ends))
    return Panel(about["title"], raster, to_poses(arrays["truth"]), tuple(about["steps"]), images, beliefs, modes)


def draw_panel(panel: Panel, *, particles: bool = True) -> Any:
    """The panel as a figure: images above, a row for each belief, a column for each step.

    Args:
        particles: draw them too, as dots.
    """
    columns, (width, height) = len(panel.steps), panel.map.box.size
    rows = [0.75, *[height / width] * len(panel.beliefs)]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(1.75 * columns + 0.2, 1.75 * sum(rows) + 0.5))
        axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows)
        for k, t in enumerate(panel.steps):
            _draw_image(axes[0, k], panel.images[k])
            axes[0, k].set_title(f"step {t + 1} of {len(panel.truth)}")
            for row, name in zip(axes[1:], panel.beliefs):
                _draw_belief(row[k], panel, name, k, particles)
        for row, name in zip(axes[1:], panel.beliefs):
            row[0].set_ylabel(TITLES.get(name, name), fontsize=9)
        draw_scale(axes[-1, 0], panel.map.box)
        figure.legend(handles=_handles(particles), loc="outside lower center", ncols=5, handlelength=1.5)
    return figure


def draw_film(panel: Panel, out: Path, *, particles: bool = True) -> None:
    """The panel as an .mp4, a frame for each of its steps: the image, and the beliefs side by side; particles as dots."""
    n, (width, height) = len(panel.beliefs), panel.map.box.size
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(3.0 * (n + 1), 3.0 * height / width + 0.6), dpi=100)
        axes = figure.subplots(1, n + 1)
        figure.legend(handles=_handles(particles), loc="outside lower center", ncols=5, handlelength=1.5)
        write_film(figure, _film_frames(figure, axes, panel, particles), out)
        plt.close(figure)


def _plain(belief: Mixture) -> Mixture:
    return Mixture(*(x.detach().cpu().float() for x in (belief.means, belief.log_weights, belief.bandwidths)), SPACE)


def _at_steps(belief: Mixture, steps: Sequence[int]) -> Mixture:
    """Of beliefs of batch shape (K), some."""
    index = torch.as_tensor(steps)
    bandwidths = belief.bandwidths if belief.bandwidths.dim() == 1 else belief.bandwidths[index]
    return Mixture(belief.means[index], belief.log_weights[index], bandwidths, SPACE)


def _region(truth: np.ndarray, half: np.ndarray) -> Box:
    """A square around the track, moved or cut so that it lies on the map whose middle is the origin."""
    low, high = truth[:, :2].min(0), truth[:, :2].max(0)
    side = np.minimum((high - low).max() / 2 + MARGIN, half)
    centre = np.clip((low + high) / 2, side - half, half - side)
    return Box(*(centre - side), *(centre + side))


def _encode(image: np.ndarray) -> bytes:
    cv2 = opencv()
    scale = min(1.0, IMAGE_HEIGHT / image.shape[1])
    small = cv2.resize(np.moveaxis(image, 0, 2)[:, :, ::-1].copy(), None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return bytes(cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 80])[1])


def _film_frames(figure: Any, axes: Any, panel: Panel, particles: bool) -> Iterator[np.ndarray]:
    for k, t in enumerate(panel.steps):
        for ax in axes:
            ax.clear()
        _draw_image(axes[0], panel.images[k])
        axes[0].set_title(f"step {t + 1} of {len(panel.truth)}")
        for ax, name in zip(axes[1:], panel.beliefs):
            _draw_belief(ax, panel, name, k, particles)
            ax.set_title(TITLES.get(name, name))
        figure.canvas.draw()
        yield np.asarray(figure.canvas.buffer_rgba())[:, :, :3].copy()


def _draw_image(ax: Any, jpeg: bytes) -> None:
    ax.set_axis_off()
    if jpeg:
        cv2 = opencv()
        ax.imshow(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1])
    else:
        ax.text(0.5, 0.5, "no image", color="0.5", ha="center", transform=ax.transAxes)


def _draw_belief(ax: Any, panel: Panel, name: str, k: int, particles: bool) -> None:
    """One map: cloud, history, truth, modes; how many modes lie beyond the map is said in a corner."""
    belief, t, box = panel.beliefs[name], panel.steps[k], panel.map.box
    bandwidths = belief.bandwidths if belief.bandwidths.dim() == 1 else belief.bandwidths[k]
    draw_map(ax, panel.map)
    draw_cloud(ax, Mixture(belief.means[k], belief.log_weights[k], bandwidths, SPACE), box)
    if particles:
        there = belief.log_weights[k] > -torch.inf  # beliefs of fewer particles than another step's are filled up
        ax.plot(*belief.means[k, there, :2].T.numpy(), ".", color=PARTICLE, ms=1.0, mew=0, zorder=3)
    ax.plot(*panel.truth[: t + 1, :2].T.numpy(), color="black", lw=1.2, zorder=4)
    length = 0.12 * max(box.size)
    draw_arrows(ax, panel.truth[t : t + 1], "black", length, 0.02, 5)
    modes = panel.modes[name][k]
    modes = modes[modes.isfinite().all(-1)]
    draw_arrows(ax, modes, MODE, length, 0.012, 6)
    low, high = torch.tensor([box.x_min, box.y_min]), torch.tensor([box.x_max, box.y_max])
    if beyond := int(((modes[:, :2] < low) | (modes[:, :2] > high)).any(-1).sum()):
        ax.text(0.98, 0.02, f"{beyond} beyond", color=MODE, fontsize=6, ha="right", transform=ax.transAxes)


def _handles(particles: bool) -> list[Any]:
    handles = [arrow_handle("black", "true pose"), plt.Line2D([], [], color="black", lw=1.2, label="true path so far")]
    handles += [cloud_handle("density of the position"), arrow_handle(MODE, "three highest modes")]
    dots = plt.Line2D([], [], color=PARTICLE, marker=".", ls="", ms=5, mew=0, label="particles")
    return handles + ([dots] if particles else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a file of a panel."""
    parser = argparse.ArgumentParser(description="Trajectories on a map, from the file of a panel.")
    parser.add_argument("file", type=Path, help=".npz of a panel")
    parser.add_argument("out", type=Path, help=".png: a picture of some of its steps; .mp4: a film of all")
    parser.add_argument("--steps", type=int, metavar="INT", default=COLUMNS, help=f"of a picture, at most [{COLUMNS}]")
    parser.add_argument(
        "--particles", action=argparse.BooleanOptionalAction, default=True, help="draw particles too, as dots [yes]"
    )
    given = parser.parse_args(arguments)
    try:
        if not given.out.parent.is_dir():
            raise ValueError(f"{given.out}: expected a file in a folder that is there")
        if given.steps < 1:
            raise ValueError(f"--steps: expected at least 1, got {given.steps}")
        panel = load_panel(given.file)
        if given.out.suffix.lower() == ".mp4":
            draw_film(panel, given.out, particles=given.particles)
        elif given.out.suffix.lower() == ".png":
            with plt.rc_context(STYLE):
                figure = draw_panel(thin(panel, given.steps), particles=given.particles)
                figure.savefig(given.out)
                plt.close(figure)
        else:
            raise ValueError(f"{given.out}: expected a file .png or .mp4")
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
