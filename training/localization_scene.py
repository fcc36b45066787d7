"""What figures of poses on a map are made of: the map, a belief's cloud, arrows; and small files of poses.

In files poses are int16: x and y in 1/32 m, headings in 1e-4 rad. What is farther than 1023 m from the frame's origin is put
there, beyond every picture.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from localization_figures import plt
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from mdps import Mixture
from mdps.localization import SPACE
from mdps.maps import Box, RasterMap

CLOUD = LinearSegmentedColormap.from_list("cloud", [(1, 0.45, 0.3, 0), (0.95, 0.1, 0.05, 0.75), (0.4, 0, 0, 0.97)])
MODE = "#0033FF"
FADED = 0.6
"""How much white there is in the map's colours, so that what lies on it can be seen."""
CELLS = 160
"""Of a cloud, along the longer side. A kernel is drawn at least as wide as a cell: it cannot fall between two of them."""
POSE_UNITS = np.array([1 / 32, 1 / 32, 1e-4])


def draw_map(ax: Any, raster: RasterMap) -> None:
    """A map in faded colours fills the axes, whose data are metres."""
    box = raster.box
    faded = 255 - (255 - raster.colour()) * (1 - FADED)
    extent = (box.x_min, box.x_max, box.y_min, box.y_max)
    ax.imshow(faded.astype(np.uint8), extent=extent, interpolation="nearest", zorder=0)
    ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set_visible(False)


def draw_cloud(ax: Any, belief: Mixture, box: Box) -> None:
    """The density of a belief's position, of batch shape (), in a box: darker is higher; the darkest is its highest."""
    width, height = box.size
    cell = max(width, height) / CELLS
    columns, rows = max(1, round(width / cell)), max(1, round(height / cell))
    x = box.x_min + (torch.arange(columns) + 0.5) * width / columns
    y = box.y_min + (torch.arange(rows) + 0.5) * height / rows
    wide = Mixture(belief.means, belief.log_weights, belief.bandwidths.clamp(min=cell), belief.space).marginal(("x", "y"))
    log_density = wide.log_prob_many(torch.cartesian_prod(x, y)).view(columns, rows).T
    density = (log_density - log_density.max()).exp() if log_density.max() > -torch.inf else torch.zeros(rows, columns)
    ax.imshow(
        density.sqrt().numpy(),
        origin="lower",
        extent=(box.x_min, box.x_max, box.y_min, box.y_max),
        cmap=CLOUD,
        vmin=0,
        vmax=1,
        zorder=2,
        interpolation="bilinear",
    )


def draw_arrows(ax: Any, poses: Tensor, colour: str, length: float, width: float, zorder: int) -> None:
    """Arrows that begin at poses (n, 3) and have their headings; length in metres, width as a share of the axes'.

    Those of a hundredth and more have a white edge.
    """
    edge = 0.4 if width >= 0.01 else 0.0
    x, y, heading = (p.numpy() for p in poses.unbind(-1))
    shape = {"headwidth": 3.5, "headlength": 4, "headaxislength": 3.5, "minshaft": 1.5}
    options = {"angles": "xy", "scale_units": "xy", "scale": 1, "edgecolor": "white", "linewidth": edge}
    ax.quiver(
        x, y, length * np.cos(heading), length * np.sin(heading), color=colour, width=width, zorder=zorder, **shape, **options
    )


def draw_scale(ax: Any, box: Box) -> None:
    """A bar of a round length in the lower left corner."""
    length = max(s for s in (5, 10, 20, 50, 100, 200, 500) if s <= 0.4 * max(box.size[0], 12.5))
    x, y = box.x_min + 0.05 * box.size[0], box.y_min + 0.05 * box.size[1]
    ax.plot([x, x + length], [y, y], color="black", lw=2, solid_capstyle="butt", zorder=7)
    ax.text(x + length / 2, y + 0.02 * box.size[1], f"{length} m", fontsize=6, ha="center", va="bottom", zorder=7)


def arrow_handle(colour: str, label: str) -> Any:
    """For a legend."""
    return plt.Line2D([], [], color=colour, marker=r"$\rightarrow$", ls="", ms=8, mew=0.3, label=label)


def cloud_handle(label: str) -> Any:
    """For a legend."""
    return plt.Rectangle((0, 0), 1, 1, fc=CLOUD(0.6), lw=0, label=label)


def to_integers(poses: Tensor) -> np.ndarray:
    units = SPACE.wrap(poses.detach().double().nan_to_num(0)).numpy() / POSE_UNITS
    return np.clip(np.rint(units), -(2**15) + 1, 2**15 - 1).astype(np.int16)


def to_poses(integers: np.ndarray) -> Tensor:
    return torch.from_numpy((integers * POSE_UNITS).astype(np.float32))


def read_file(path: Path, expected: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"][()]))
            if about["format"] != expected:
                raise ValueError(f"it is {about['format']!r}")
            return about, {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except Exception as error:  # a damaged file fails anywhere in zipfile, zlib, json or numpy
        raise ValueError(f"{path}: not a file of format {expected!r}: {error}") from None
