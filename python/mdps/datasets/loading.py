"""From sequences to tensors: images read, resized and rectified, a piece of the map around them, noisy odometry.

An item is one sequence of T frames. Nothing about its map gives the track away: the crop has one size, lies anywhere where it
still shows every pose with `MARGIN` metres around it, and is drawn anew in every epoch of training. All that is random in an
item comes from the data set's seed, the sequence's name and the number of the draw: evaluations repeat exactly, and an epoch
of training does not depend on how many workers load it.

The crop's pixels: u to the right is East, v down is South, integers at the centres of pixels. On the screen angles run
clockwise: the angle of `uv_pose` is minus the heading, so that a step ahead changes (u, v) by (cos, sin) of it. It is what
`ops.pose_correlation` takes for a template whose last column is the farthest ahead; where that is its first row, add pi / 2.
"""

import gc
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, get_worker_info

from ..maps import Box, RasterMap
from ..maps.errors import DataError, opencv
from .camera import Camera, fit, heading_of, rectify, resize, resize_to_focal_length, wrap_radians
from .odometry import OdometryNoise, noisy_odometry
from .reading import read_image
from .scene import Frame
from .sequences import Run

_KEPT_BYTES = 2**28
"""Of decoded images, if they may stay in memory."""
MARGIN = 32.0
"""Metres of map around every pose, as far as the networks look."""


class ImageFormat(NamedTuple):
    """What images are brought to: width x height pixels, padded with black or cropped where the proportions differ."""

    width: int
    height: int
    focal_length: float | None = None
    """fx in pixels; None: the image as large as fits."""


MAPILLARY_IMAGE = ImageFormat(256, 256)
KITTI_IMAGE = ImageFormat(448, 160, 256.0)


class SequenceDataset(Dataset[dict[str, Any]]):
    """Sequences of T frames as tensors.

    Args:
        sequences: all of one length T.
        maps: the map of each scene, by name; all of one resolution. Those of other scenes are not kept.
        image: size and focal length of the images.
        crop_metres: side of the square of map; the authors take 400 for T = 10 and 1228 for T = 100.
        noise: of the odometry.
        seed: any integer >= 0.

    Sequences that do not fit into the crop are left out, and are in `left_out`. `has_shifts` says whether items have `shift`.

    An item, `dataset[i]` (always the same) or `dataset[i, draw]` (another crop and noise for every draw >= 0), is a dict:
        image uint8 (T, 3, H, W): RGB, rectified: roll and pitch are gone; black where nothing is known.
        camera float32 (T, 4): fx, fy, cx, cy in pixels, integers at pixel centres.
        pose float32 (T, 3): x East, y North in metres in the map's frame, heading in [-pi, pi), counter-clockwise from East.
        uv_pose float32 (T, 3): u, v in pixels of the crop, angle in [-pi, pi) clockwise on the screen from u's direction.
        odometry float32 (T - 1, 3): noisy change of uv_pose from each frame to the next.
        map uint8 (3, S, S): classes of areas, ways, nodes; 0 is void.
        map_origin float64 (2,): where the centre of the crop's first pixel lies, x and y in metres.
        pixels_per_metre float64 ().
        seconds float64 (T,): time since the sequence's first frame; frames need not be equally far apart.
        observed bool (T,): False where the image could not be read; it is black there.
        mounts float32 (V, 3): only of panoramas, whose V directions image (T, V, 3, H, W) and camera (T, V, 4) have, observed
            where all could be read: metres ahead and to the left, which are 0, and radians to the left that each looks.
        shift float32 (T, 3): KITTI's fixed initial errors (`kitti.initial_errors`), only if all frames have them.
        name str.

    Raises:
        ValueError: sequences of several lengths or numbers of views, maps of several resolutions, a crop without room.
        DataError: no map for a scene.

    Cost: 3.4 ms a frame (a JPEG of 512 x 512; KITTI's PNGs take 15 ms), and 7 ms for 2456 x 2456 pixels of map.
    Where all images have at most 256 MB they stay in memory once they are decoded, but for processes that load data.
    """

    def __init__(
        self,
        sequences: Sequence[Run],
        maps: Mapping[str, RasterMap],
        *,
        image: ImageFormat,
        crop_metres: float,
        noise: OdometryNoise,
        seed: int = 0,
    ) -> None:
        lengths = {len(run.frames) for run in sequences}
        if len(lengths) > 1:
            raise ValueError(f"sequences: expected all of one length, got lengths {sorted(lengths)}")
        views = {1 + len(frame.beside) for run in sequences for frame in run.frames}
        if len(views) > 1:
            raise ValueError(f"sequences: expected as many views in every frame, got {sorted(views)}")
        scenes = sorted({run.scene for run in sequences})
        for scene in scenes:
            if scene not in maps:
                raise DataError(f"{scene}: expected a map in `maps`, got those of {', '.join(sorted(maps)) or 'no scene'}")
        resolutions = {maps[scene].pixels_per_metre for scene in scenes}
        if len(resolutions) > 1:
            raise ValueError(f"maps: expected one resolution, got {sorted(resolutions)} pixels per metre")
        if crop_metres <= 2 * MARGIN:
            raise ValueError(f"crop_metres: expected more than {2 * MARGIN:.0f}, got {crop_metres}")
        fits = [run.extent <= crop_metres - 2 * MARGIN - 2 for run in sequences]  # 2 m: the crop lies on whole pixels
        self.sequences = [run for run, is_inside in zip(sequences, fits) if is_inside]
        self.left_out = [run for run, is_inside in zip(sequences, fits) if not is_inside]
        self.maps = {scene: maps[scene] for scene in sorted({run.scene for run in self.sequences})}  # workers get a copy
        self.image, self.crop_metres, self.noise, self.seed = image, crop_metres, noise, seed
        self.n_views = max(views, default=1)
        pixels = image.width * image.height * self.n_views * sum(len(run.frames) for run in self.sequences)
        self._kept: dict[int, dict[str, Tensor]] | None = {} if 3 * pixels <= _KEPT_BYTES else None
        self.has_shifts = bool(self.sequences) and all(f.shift is not None for run in self.sequences for f in run.frames)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        i, draw = index if isinstance(index, tuple) else (index, 0)
        run = self.sequences[i]
        random = np.random.default_rng([self.seed, zlib.crc32(run.name.encode()), draw])
        crop, pose, uv_pose = self._place(run, random)
        position_noise = self.noise.metres * crop.pixels_per_metre
        odometry = noisy_odometry(uv_pose, position_noise, np.radians(self.noise.degrees), random)
        item: dict[str, Any] = {name: tensor.clone() for name, tensor in self._images(i).items()}
        seconds = np.array([frame.seconds for frame in run.frames])
        item |= {
            "pose": _float32(pose),
            "uv_pose": _float32(uv_pose),
            "odometry": _float32(odometry),
            "map": torch.from_numpy(crop.classes),
            "map_origin": torch.from_numpy(crop.to_metres(np.zeros(2))),
            "pixels_per_metre": torch.tensor(crop.pixels_per_metre, dtype=torch.float64),
            "seconds": torch.from_numpy(seconds - seconds[0]),
            "name": run.name,
        }
        if self.n_views > 1:
            turns = wrap_radians(np.arange(self.n_views) * np.pi / 2)
            item["mounts"] = _float32(np.stack([0 * turns, 0 * turns, turns], 1))
        if self.has_shifts:
            item["shift"] = _float32(np.array([frame.shift for frame in run.frames]))
        return item

    def _place(self, run: Run, random: np.random.Generator) -> tuple[RasterMap, np.ndarray, np.ndarray]:
        """A crop of the map that shows the sequence, its poses in metres, and in pixels of the crop."""
        raster = self.maps[run.scene]
        xy = np.array([(frame.x, frame.y) for frame in run.frames])
        heading = heading_of([frame.yaw for frame in run.frames])
        crop = raster.query(draw_crop(xy, raster, self.crop_metres, random))
        uv_pose = np.concatenate([crop.to_pixels(xy), wrap_radians(-heading)[:, None]], 1)
        return crop, np.concatenate([xy, heading[:, None]], 1), uv_pose

    def _images(self, i: int) -> dict[str, Tensor]:
        """Images are the same at every draw: few of them are decoded once, unless processes would each keep their own."""
        if self._kept is None or get_worker_info() is not None:
            return self._decode(self.sequences[i])
        if i not in self._kept:
            self._kept[i] = self._decode(self.sequences[i])
        return self._kept[i]

    def _decode(self, run: Run) -> dict[str, Tensor]:
        (width, height, _), shape = self.image, (len(run.frames), self.n_views)
        image = np.zeros((*shape, 3, height, width), np.uint8)
        camera, observed = np.zeros((*shape, 4)), np.zeros(shape, bool)
        views = [((t, v), view) for t, frame in enumerate(run.frames) for v, view in enumerate((frame, *frame.beside))]
        for at, view in views:
            try:
                pixels, used = load_image(view, self.image)
            except DataError as error:
                logging.getLogger("mdps").warning("image not used: %s", error)
                blank = np.zeros((view.camera.height, view.camera.width, 3), np.uint8)
                pixels, used = to_format(blank, view.camera, self.image)
            else:
                observed[at] = True
            image[at], camera[at] = pixels.transpose(2, 0, 1), used[2:]
        if self.n_views == 1:
            image, camera = image[:, 0], camera[:, 0]
        return {"image": torch.from_numpy(image), "camera": _float32(camera), "observed": torch.from_numpy(observed.all(1))}


def load_image(frame: Frame, image: ImageFormat) -> tuple[np.ndarray, Camera]:
    """Read the image of a frame, RGB uint8 (H, W, 3), in this format and without roll and pitch, with its camera.

    Raises:
        DataError: the file is not there, or is no whole image.
    """
    pixels, camera = to_format(*read_image(frame.image, frame.camera), image)
    return rectify(pixels, camera, frame.roll, frame.pitch), camera


def draw_crop(xy: np.ndarray, raster: RasterMap, metres: float, random: np.random.Generator) -> Box:
    """Draw where a square of map lies: uniform over the raster's pixels among all that show every position with its margin.

    Args:
        xy: (n, 2), positions in metres; their extent leaves room for `MARGIN` on both sides.
        metres: side of the square; rounded to whole pixels.
    """
    scale = raster.pixels_per_metre
    size = round(metres * scale)
    uv, margin = raster.to_pixels(xy), MARGIN * scale
    last = np.floor(uv.min(0) - margin).astype(int)  # column and row of the crop's first pixel
    first = np.ceil(uv.max(0) + margin).astype(int) - size + 1
    left, top = random.integers(np.minimum(first, last), last + 1)
    x, y = raster.box.x_min + left / scale, raster.box.y_max - (top + size) / scale
    return Box(x, y, x + size / scale, y + size / scale)


class FreshDraws(Sampler[tuple[int, int]]):
    """All indices of a data set in a random order, each with the number of the epoch: other crops and noise every time.

    The order depends on the seed and the epoch, which counts up by itself, or is set (Lightning does, also when it resumes).
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Make this the number of the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        yield from ((int(i), epoch) for i in order)


def start_worker(worker: int) -> None:
    """What a worker process of a DataLoader does first.

    OpenCV must not start threads beside it. What was there before the fork is no garbage: collections that looked at it would
    write into it, and so copy the memory that the workers share.
    """
    opencv().setNumThreads(0)
    gc.freeze()


def to_format(pixels: np.ndarray, camera: Camera, image: ImageFormat) -> tuple[np.ndarray, Camera]:
    """Bring an image (H, W, C) uint8 and its camera to a format: resized, then cropped or padded with black."""
    if image.focal_length is not None:
        pixels, camera = resize_to_focal_length(pixels, camera, image.focal_length)
    else:
        scale = min(image.width / camera.width, image.height / camera.height)
        pixels, camera = resize(pixels, camera, max(round(camera.width * scale), 1), max(round(camera.height * scale), 1))
    return fit(pixels, camera, image.width, image.height)


def _float32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
