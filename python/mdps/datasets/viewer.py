"""A sequence to be looked at: its images, and the map with track, camera frustums and noisy odometry.

As a picture (.png) it shows up to eight frames; as a film (.mp4) all of them, one after another. Everything comes from an item
of `SequenceDataset`, so that what is seen is what a network gets: a wrong yaw, focal length or origin of the map shows at once.

Cost: about 2 s a picture, 0.15 s for each frame of a film.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np

from ..maps import Box, Projection, RasterMap
from ..maps.errors import DataError, opencv
from . import kitti, mapillary
from .loading import KITTI_IMAGE, MAPILLARY_IMAGE, MARGIN, SequenceDataset
from .odometry import KITTI_NOISE, MAPILLARY_NOISE
from .scene import Problems, Scene
from .sequences import Run, runs

STRIP = 8
"""Images in a picture."""
FRUSTUM = 12.0
"""How far a frustum is drawn, in metres; farther where the track is long."""
FRAMES_PER_SECOND = 5


def show(root: str | Path, sequence: str, out: str | Path, *, length: int = 10) -> str:
    """Draw a sequence of `length` frames to a file; return its name.

    Args:
        root: folder of MGL, of one of its scenes, or of KITTI.
        sequence: its name, or how it begins: scene/track/first frame, with or without the scene; "": the first.
        out: .png for a picture, .mp4 for a film.

    Raises:
        DataError: no such folder or sequence. ValueError: another kind of file. ImportError: matplotlib or OpenCV is missing.
    """
    out = Path(out)
    if out.suffix.lower() not in (".png", ".mp4"):
        raise ValueError(f"out: expected a file .png or .mp4, got {out.name!r}")
    if not out.absolute().parent.is_dir():
        raise DataError(f"{out.absolute().parent}: no such folder")
    run, scene = find_sequence(Path(root), sequence, length)
    item = _item(run, scene)
    if out.suffix.lower() == ".png":
        _picture(item).savefig(out)
    else:
        _film(item, out)
    return run.name


def find_sequence(root: Path, name: str, length: int) -> tuple[Run, Scene]:
    """Find the first sequence of `length` frames whose name, with or without its scene's, begins like this.

    Raises:
        DataError: there is none; the message says what there is.
    """
    tracks: list[str] = []
    problems = Problems()
    for scene in _scenes(root, name):
        for run in runs(scene, length):
            if run.name.startswith(name) or run.name.removeprefix(f"{scene.name}/").startswith(name):
                return run, scene
        tracks += [f"{scene.name}/{track.name} ({len(track.frames)} frames)" for track in scene.tracks]
        problems.merge(scene.problems)
    listed = ", ".join(tracks[:5]) + (f" and {len(tracks) - 5} more" if len(tracks) > 5 else "")
    wanted = f"sequence {name!r} of {length} frames" if name else f"sequence of {length} frames"
    raise DataError(f"{root}: no {wanted}; tracks: {listed or 'none that can be used, `check` says why'}")


def _scenes(root: Path, name: str) -> Iterator[Scene]:
    folders = mapillary.find_scenes(root)
    if not folders:
        if not kitti.is_root(root):
            raise DataError(f"{root}: neither MGL nor KITTI")
        yield kitti.read_drives(root)
    named = [folder for folder in folders if folder.name == name.partition("/")[0]]
    for folder in named or folders:
        yield mapillary.read_scene(folder)


def _item(run: Run, scene: Scene) -> dict[str, Any]:
    """The sequence as a network gets it; where there is no map, on an empty one."""
    xy = np.array([(frame.x, frame.y) for frame in run.frames])
    raster = scene.map or _empty_map(xy, scene.projection)
    image, noise = (KITTI_IMAGE, KITTI_NOISE) if scene.name == "kitti" else (MAPILLARY_IMAGE, MAPILLARY_NOISE)
    crop = max(160.0, math.ceil(run.extent) + 2 * MARGIN + 4)
    return SequenceDataset([run], {run.scene: raster}, image=image, crop_metres=crop, noise=noise)[0] | {"raster": raster}


def _empty_map(xy: np.ndarray, projection: Projection | None) -> RasterMap:
    left, bottom = np.floor(xy.min(0) - 100)
    width, height = (int(n) for n in np.ceil(xy.max(0) + 100 - (left, bottom)))
    classes = np.zeros((3, height, width), np.uint8)
    return RasterMap(classes, 1.0, Box(left, bottom, left + width, bottom + height), projection or Projection(0, 0))


def _picture(item: dict[str, Any]) -> Any:
    """Images in two rows on the left, the map on the right."""
    n = len(item["image"])
    shown = sorted({round(i) for i in np.linspace(0, n - 1, min(STRIP, n))})
    wide = item["image"].shape[3] > 2 * item["image"].shape[2]
    columns = 2 if wide else 4
    rows = math.ceil(len(shown) / columns)
    figure = _figure(15, 6)
    grid = figure.add_gridspec(rows, columns + 3, width_ratios=[1.0] * columns + [columns / 4] * 3)
    for k, t in enumerate(shown):
        axes = figure.add_subplot(grid[k // columns, k % columns])
        _draw_image(axes, item, t)
    axes = figure.add_subplot(grid[:, columns:])
    _draw_map(axes, item)
    for t in _apart(item, shown):
        _draw_frustum(axes, item, t)
    axes.legend(loc="upper right", fontsize=8)
    return figure


def _film(item: dict[str, Any], out: Path) -> None:
    """The image on the left, the map with the camera where it is on the right."""
    figure = _figure(12, 6)
    wide = item["image"].shape[3] > 2 * item["image"].shape[2]
    left, right = figure.subplots(1, 2, width_ratios=[1.6 if wide else 1.0, 1.0])
    _draw_map(right, item)
    right.legend(loc="upper right", fontsize=8)
    write_film(figure, (_film_frame(figure, left, right, item, t) for t in range(len(item["image"]))), out)


def _film_frame(figure: Any, left: Any, right: Any, item: dict[str, Any], t: int) -> np.ndarray:
    """Draw one frame of a film, RGB uint8 (H, W, 3)."""
    left.clear()
    _draw_image(left, item, t)
    frustum = _draw_frustum(right, item, t)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[:, :, :3].copy()
    for artist in frustum:
        artist.remove()
    return pixels


def write_film(figure: Any, frames: Iterator[np.ndarray], out: Path) -> None:
    """Write frames of a matplotlib figure, RGB uint8 (H, W, 3), to an .mp4: with ffmpeg, or with OpenCV where that is missing.

    Raises:
        DataError: ffmpeg fails. ImportError: neither can write films.
    """
    if shutil.which("ffmpeg"):
        _write_with_ffmpeg(figure, frames, out)
    else:
        _write_with_opencv(frames, out)


def _write_with_ffmpeg(figure: Any, frames: Iterator[np.ndarray], out: Path) -> None:
    from matplotlib.animation import FFMpegWriter
    from matplotlib.figure import Figure

    plain = Figure(figure.get_size_inches(), dpi=figure.dpi)
    image = None
    writer = FFMpegWriter(fps=FRAMES_PER_SECOND)
    try:
        with writer.saving(plain, str(out), figure.dpi):
            for pixels in frames:
                image = plain.figimage(pixels) if image is None else image
                image.set_data(pixels)
                writer.grab_frame()
    except CalledProcessError as error:
        raise DataError(f"{out}: ffmpeg could not write it, status {error.returncode}") from None


def _write_with_opencv(frames: Iterator[np.ndarray], out: Path) -> None:
    cv2 = opencv()
    writer = None
    for pixels in frames:
        if writer is None:
            size = pixels.shape[1::-1]
            writer = cv2.VideoWriter(str(out), cv2.VideoWriter.fourcc(*"mp4v"), FRAMES_PER_SECOND, size)
            if not writer.isOpened():
                raise ImportError(f"{out}: this OpenCV writes no films; install ffmpeg, or draw a .png")
        writer.write(np.ascontiguousarray(pixels[:, :, ::-1]))
    if writer is not None:
        writer.release()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure((width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_image(axes: Any, item: dict[str, Any], t: int) -> None:
    axes.imshow(item["image"][t].permute(1, 2, 0).numpy())
    told = "" if item["observed"][t] else ", not readable"
    axes.set_title(f"{t}: {item['seconds'][t]:.1f} s{told}", fontsize=8)
    axes.set_axis_off()


def _draw_map(axes: Any, item: dict[str, Any]) -> None:
    """The map around the track, the track, and the odometry summed up from the first pose; in metres."""
    raster, scale = item["raster"], item["pixels_per_metre"].item()
    classes = item["map"].numpy()
    height, width = classes.shape[1:]
    corners = _metres(item, np.array([[-0.5, height - 0.5], [width - 0.5, -0.5]]))
    crop = RasterMap(classes, scale, Box(*corners.ravel()), raster.projection)
    axes.imshow(crop.colour(), extent=(*corners[:, 0], *corners[:, 1]), interpolation="nearest")
    v, u = np.nonzero(classes[2])
    axes.plot(*_metres(item, np.stack([u, v], 1)).T, ".", color="black", markersize=2, label="nodes")
    uv, odometry = item["uv_pose"].numpy()[:, :2], item["odometry"].numpy()[:, :2]
    truth, summed = _metres(item, uv), _metres(item, uv[0] + np.concatenate([np.zeros((1, 2)), np.cumsum(odometry, 0)]))
    style: dict[str, Any] = {"marker": "o" if len(truth) <= 30 else "", "markeredgecolor": "white"}
    axes.plot(*truth.T, "-", color="white", linewidth=4)
    axes.plot(*summed.T, "--", color="tab:purple", markersize=4, linewidth=1.5, label="noisy odometry", **style)
    axes.plot(*truth.T, "-", color="black", markersize=5, linewidth=2, label="truth", **style)
    centre, half = (truth.min(0) + truth.max(0)) / 2, np.ptp(truth, axis=0).max() / 2 + MARGIN
    (left, bottom), (right, top) = np.clip([centre - half, centre + half], *corners)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.set_xlabel("East [m]")
    axes.set_ylabel("North [m]")
    axes.set_title(item["name"], fontsize=9)


def _apart(item: dict[str, Any], shown: list[int]) -> list[int]:
    """Those of the frames that are far enough from each other to be told apart on the map."""
    uv = item["uv_pose"].numpy()[:, :2]
    distance = max(4 * item["pixels_per_metre"].item(), float(np.ptp(uv, axis=0).max()) / 20)
    kept = shown[:1]
    for t in shown[1:]:
        if np.hypot(*(uv[t] - uv[kept[-1]])) >= distance:
            kept.append(t)
    return kept


def _draw_frustum(axes: Any, item: dict[str, Any], t: int) -> list[Any]:
    """What the camera of frame t sees, as a triangle with the frame's number."""
    u, v, angle = item["uv_pose"][t].tolist()
    fx, _, cx, _ = item["camera"][t].tolist()
    extent = float(np.ptp(item["uv_pose"].numpy()[:, :2], axis=0).max())
    width, reach = item["image"].shape[3], max(FRUSTUM * item["pixels_per_metre"].item(), extent / 10)
    edges = (angle - math.atan((cx + 0.5) / fx), angle + math.atan((width - 0.5 - cx) / fx))
    corners = [(u, v), *((u + reach * math.cos(a), v + reach * math.sin(a)) for a in edges)]
    colour = "tab:red" if item["observed"][t] else "gray"
    x, y = _metres(item, np.array(corners)).T
    drawn = axes.fill(x, y, facecolor=colour, alpha=0.4, edgecolor="white", linewidth=0.5)
    box = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"}
    drawn.append(axes.annotate(str(t), (x[0], y[0]), fontsize=7, xytext=(5, 5), textcoords="offset points", bbox=box))
    return drawn


def _metres(item: dict[str, Any], uv: np.ndarray) -> np.ndarray:
    """Pixels of the crop (n, 2) to metres in the map's frame."""
    return item["map_origin"].numpy() + uv * np.array([1, -1]) / item["pixels_per_metre"].item()
