"""A trained smoother in use: from one file, on a map, image by image or for a whole sequence.

Online, the map is encoded around the particles alone. Where a step leads the views of some near the edge of the piece, another
one is cut around them (`map_pieces`) and the step is done again: particles are only ever weighed on a piece that holds all that
their views cover. The filter's frame has its origin in the middle of the piece, where numbers are small; what is returned is in
the map's frame.

The file is torch's .zip: numbers, names and weights, read with `weights_only`. Nothing in it is executed.
Source: the paper, "City Scale Global Localization Task", for the forward start; the backward filter's, anywhere on the map, is
our own: where a sequence ends is not known.
Cost of a step: that of the image network, and one `ops.pose_correlation` score a particle; where a piece is cut, the map
network on it: some 560 m wide at a start of 50 m, then 220 m, about every 48 m of the way.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .. import ops
from ..datasets.camera import Camera
from ..datasets.loading import ImageFormat, to_format
from ..filters import FilterState
from ..maps import AREAS, NODES, WAYS, RasterMap
from ..maps.errors import DataError
from ..maps.raster_map import check_groups
from ..mixture import Mixture
from ..sequences import whole_number
from ..smoothers import SmootherBeliefs
from . import inputs
from .batch import Batch, anywhere, around, to_batch
from .birds_eye import Encoders
from .geometry import BirdsEyeView, Grid
from .map_pieces import Piece, covers, cut
from .map_smoother import MapSmoother
from .models import MapLikelihood, OdometryDynamics, make_scene, mounted, seeing
from .sizes import EncoderSizes

_FORMAT = "mdps localizer 1"
_AT_ONCE = 16
"""Images that are encoded together."""


class _Track(NamedTuple):
    """Where an online localization stands."""

    raster: RasterMap
    piece: Piece
    """The filter's frame has its origin in the middle of it."""
    initial: Tensor
    """(1, N, 3), the particles of the start."""
    seed: Tensor
    """int64 (1,), the filter's."""
    state: FilterState | None
    """None: no image has been seen."""
    mounts: Tensor | None
    """(V, 3), of several cameras."""


class Localizer:
    """Localizes a camera on a map with a trained `MapSmoother`.

    Args:
        model: the smoother; it is used as it is, without a copy, in evaluation mode.
        image: the format of the images that it was trained with. Others are resized, and cropped or padded.

    Raises:
        ValueError: a format without pixels.

    Example, with a folder of scenes as Mapillary's, or as training/make_city.py makes them:

        import torch
        from mdps.datasets import MapillaryDataModule
        from mdps.localization import RADII, Localizer, to_batch

        localizer = Localizer.load("localizer.pt")
        data = MapillaryDataModule("data", scenes={"test": ["berlin"]}, crop_metres=256.0, image=localizer.image)
        data.setup()
        sequence = data.test[0]

        # offline: every step knows all images of the sequence
        smoothed = localizer.smooth(sequence, seed=torch.tensor(1)).smoothed
        print(smoothed.mean[0] - sequence["pose"])  # metres East, metres North, radians

        # online: image by image; odometry in metres East, metres North and radians
        batch = to_batch(sequence)
        localizer.start(data.test.maps["berlin"], sequence["pose"][0], seed=torch.tensor(2))
        for t in range(10):
            odometry = batch.actions[0, t] if t > 0 else None
            belief = localizer.step(batch.images[0, t], batch.camera[0, t], odometry)
            poses, log_densities = belief.modes(3, RADII)
            print(f"at {poses[0, 0]:.1f} m, {poses[0, 1]:.1f} m, or at one of {poses[1:].tolist()}")
    """

    def __init__(self, model: MapSmoother, image: ImageFormat) -> None:
        inputs.at_least(1, width=image[0], height=image[1])
        self.model, self.image = model.eval(), ImageFormat(*image)
        self._track: _Track | None = None

    # ---- Files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that `load` needs to a file at exactly this path, which appears whole or not at all.

        Raises:
            ValueError: a model with dynamics of another class than `OdometryDynamics`.
        """
        smoother, sizes = self.model.smoother, dataclasses.asdict(self.model.encoders.sizes)
        moves = [smoother.forward_filter.dynamics, smoother.backward_filter.dynamics]
        content = {
            "format": _FORMAT,
            "groups": {"areas": AREAS, "ways": WAYS, "nodes": NODES},
            "sizes": sizes | {"grid": tuple(self.model.encoders.sizes.grid)},
            "image": tuple(self.image),
            "n_particles": smoother.forward_filter.n_particles,
            "dynamics": [_options(move) for move in moves],
            "state_dict": {name: value.detach().cpu() for name, value in self.model.state_dict().items()},
        }
        target = Path(path)
        part = target.with_name(target.name + ".part")
        try:
            torch.save(content, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> "Localizer":
        """Read what `save` wrote.

        Raises:
            DataError: no such file, another format, damaged, or for maps of other classes than this version's.
            ImportError: the image network is one of torchvision, which is not installed.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except Exception as error:  # a damaged file fails anywhere in zipfile, pickle or torch
            raise DataError(f"{path}: not a file that Localizer.save wrote, or damaged: {_line(error)}") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise DataError(f"{path}: expected a file of format {_FORMAT!r}, that Localizer.save wrote, got {found!r}")
        check_groups(content.get("groups"), path)
        try:
            localizer = _build(content)
        except ImportError:
            raise
        except Exception as error:  # what a file says can be wrong in any way
            raise DataError(f"{path}: what it holds does not fit together: {_line(error)}") from None
        localizer.model.to(device)
        return localizer

    # ---- Online ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(
        self,
        map: RasterMap | tuple[NDArray[np.uint8] | Tensor, float],
        pose: ArrayLike,
        *,
        metres: float = 50.0,
        heading_concentration: float = 100.0,
        n_first: int = 1000,
        mounts: ArrayLike | None = None,
        seed: Tensor | None = None,
    ) -> None:
        """Begin on a map, anew. `step` goes on.

        Args:
            map: a map, or its classes uint8 (3, H, W) and pixels per metre; in its frame the origin is then the map's middle.
            pose: about where the first image is taken: x East, y North [m] in the map's frame, heading [rad] from East; on
                the map, or not farther from it than 3 times `metres`.
            metres: standard deviation of the place, East and North. heading_concentration: kappa of the heading.
            n_first: particles of the first step.
            mounts: (V, 3), where V cameras sit that take images together: metres ahead and to the left of the pose, and
                radians to the left that each looks. Their scores add up. None: one camera, at the pose.
            seed: int64 (); None: from torch's generator.

        Raises:
            TypeError: seed, n_first. ValueError: a map of another resolution than that of training, or another argument.
        """
        raster = inputs.raster(map)
        self._check_resolution(raster.pixels_per_metre)
        x, y, heading = inputs.numbers("pose", pose, 3)
        inputs.at_least(0, metres=metres, heading_concentration=heading_concentration)
        inputs.near_map("pose", x, y, raster.box, 3 * metres)
        n_first = whole_number("n_first", n_first, 1)
        sit = None if mounts is None else self._tensor(inputs.rows("mounts", mounts, 3))
        places, _, run = self._seeds(seed)
        middle = raster.box.centre
        about = torch.tensor([[x - middle[0], y - middle[1], heading]], dtype=self._dtype, device=run.device)
        initial = around(about, n_first, metres, heading_concentration, places)
        piece = cut(self.model.encoders, raster, _places(initial, sit, middle))
        initial = _moved(initial, np.subtract(middle, piece.box.centre))
        filter_seed = ops.split_seed(ops.split_seed(run, 1), 3)[:, 0].contiguous()  # as in a smoother's call
        self._track = _Track(raster, piece, initial, filter_seed, None, sit)

    @torch.no_grad()
    def step(
        self,
        image: NDArray[np.uint8] | Tensor | Sequence[NDArray[np.uint8] | Tensor | None] | None,
        camera: Camera | ArrayLike | Sequence[Camera | ArrayLike | None] | None = None,
        odometry: ArrayLike | None = None,
    ) -> Mixture:
        """Take the next image, and say where it was taken.

        Args:
            image: uint8 (H, W, 3) or (3, H, W), RGB, of a level camera (`mdps.datasets.camera.rectify` makes it one) that looks
                along the heading; None: there is none. With the mounts of `start`: V of these, of which some may be None.
            camera: fx, fy, cx, cy in pixels of this image, integers at pixel centres; with mounts, V of these.
            odometry: how the pose changed since the step before: metres East, metres North, radians counter-clockwise. None at
                the first step after `start`.

        Returns:
            The belief over x, y [m] in the map's frame and heading [rad]: batch shape (), float64; `mean`, `modes(k, RADII)`.

        Raises:
            RuntimeError: before `start`. ValueError: an argument, and which.
        """
        if self._track is None:
            raise RuntimeError("there is no map: call start(map, pose) first")
        track = self._track
        if track.state is None and odometry is not None:
            raise ValueError("odometry: expected None at the first step, whose image is taken where `start` said")
        view, is_seen = self._views(image, camera, track.mounts)
        observed = torch.tensor([is_seen], device=self._device)
        f, piece = self.model.smoother.forward_filter, track.piece
        if track.state is None:
            with self._seeing(piece, view, track.mounts) as codes:
                state = f.start(track.initial, codes, observed, track.seed)
        else:
            action = self._tensor([inputs.numbers("odometry", odometry, 3)])
            piece, state = self._next(track, track.state, view, action, observed)
        self._track = track._replace(piece=piece, state=state)
        belief = f.posterior(state)
        alone = Mixture(belief.means[0], belief.log_weights[0], belief.bandwidths, belief.space)
        return _at(alone, torch.tensor(piece.box.centre, dtype=torch.float64))

    def _next(
        self, track: _Track, before: FilterState, view: BirdsEyeView, action: Tensor, observed: Tensor
    ) -> tuple[Piece, FilterState]:
        """Move and weigh; on another piece where this one does not hold all that is seen."""
        f, piece = self.model.smoother.forward_filter, track.piece
        with self._seeing(piece, view, track.mounts) as codes:
            state = f.step(before, codes, action, observed)
        places = _places(state.predicted.states, track.mounts, piece.box.centre)
        if covers(self.model.encoders, piece, track.raster, places):
            return piece, state
        piece = cut(self.model.encoders, track.raster, places)
        before = _moved_state(before, np.subtract(track.piece.box.centre, piece.box.centre))
        with self._seeing(piece, view, track.mounts) as codes:
            return piece, f.step(before, codes, action, observed)

    # ---- Offline --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def smooth(
        self,
        sequence: Batch | Mapping[str, Any],
        *,
        metres: float = 50.0,
        heading_concentration: float = 100.0,
        n_first: int = 1000,
        n_last: int = 1500,
        seed: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Say of every step of whole sequences where it was, given all their images.

        Args:
            sequence: an item of `mdps.datasets.SequenceDataset`, or some that are collated, or a `Batch`; it says where several
                cameras sit. Of its poses only the first one is used, as `pose` of `start`; where the sequence ends may be
                anywhere on the map.
            metres, heading_concentration, n_first: as for `start`.
            n_last: particles of the backward filter's first step, which is the last.
            seed: int64 (); None: from torch's generator. With the seed and the map of `start`, the forward beliefs are those of
                `step`.

        Returns:
            Beliefs of batch shape (B, T), B = 1 for one item. They are in the frame of the sequence's poses: of an item, the
            map's, in float64; of a `Batch`, metres from the middle of each map.

        Raises:
            TypeError: seed, n_first, n_last. ValueError: maps of another resolution, or images of another format, than those of
                training; what is missing, of another shape, or not finite where it is used; another argument.
        """
        inputs.at_least(0, metres=metres, heading_concentration=heading_concentration)
        n_first, n_last = whole_number("n_first", n_first, 1), whole_number("n_last", n_last, 1)
        batch = sequence if isinstance(sequence, Batch) else to_batch(sequence)
        self._check_resolution(batch.pixels_per_metre)
        inputs.batch(batch, (self.image.height, self.image.width), 3 * metres)
        places, ends, run = self._seeds(seed)
        batch, dtype = batch.to(run.device), self._dtype
        poses, actions, camera = (x.to(dtype) for x in (batch.poses, batch.actions, batch.camera))
        mounts = None if batch.mounts is None else batch.mounts.to(dtype)
        seen = batch.images, camera, batch.classes, batch.pixels_per_metre
        scene = self.model.observe(*seen, mounts=mounts, chunk=_AT_ONCE)
        width, height = (batch.classes.size(i) / batch.pixels_per_metre for i in (-1, -2))
        initial = around(poses[:, 0], n_first, metres, heading_concentration, places)
        final = anywhere(len(poses), n_last, (width, height), ends).to(dtype)
        beliefs = self.model(scene, initial, final, actions, batch.observed, run)
        if isinstance(sequence, Batch):
            return beliefs
        half = 0.5 / batch.pixels_per_metre  # of a pixel
        first_pixel = torch.tensor([half - width / 2, height / 2 - half], dtype=torch.float64)
        middle = (sequence["map_origin"] - first_pixel).view(-1, 1, 1, 2)
        forward, backward = (
            b._replace(posterior=_at(b.posterior, middle), predicted=_at(b.predicted, middle))
            for b in (beliefs.forward, beliefs.backward)
        )
        return beliefs._replace(smoothed=_at(beliefs.smoothed, middle), forward=forward, backward=backward)

    # ---- Views and seeds ------------------------------------------------------------------------------------------------

    def _views(self, images: Any, cameras: Any, mounts: Tensor | None) -> tuple[BirdsEyeView, bool]:
        """What is seen at a step, (1, 1, ...) or with mounts (1, 1, V, ...), and whether anything is."""
        if mounts is None or images is None:
            view = self._view(images, cameras)
            return (view if mounts is None else _beside([view] * len(mounts))), images is not None
        for name, given in (("image", images), ("camera", cameras)):
            n = len(given) if hasattr(given, "__len__") else type(given).__name__
            if n != len(mounts):
                raise ValueError(f"{name}: expected {len(mounts)} of them, as there are mounts, got {n}")
        seen = [self._view(image, camera) for image, camera in zip(images, cameras)]
        return _beside(seen), any(image is not None for image in images)

    def _view(self, image: NDArray[np.uint8] | Tensor | None, camera: Camera | ArrayLike | None) -> BirdsEyeView:
        sizes = self.model.encoders.sizes
        if image is None:
            cells = torch.zeros(1, 1, sizes.grid.depth, sizes.grid.width, device=self._device)
            return BirdsEyeView(cells.unsqueeze(2).expand(-1, -1, sizes.matching, -1, -1), cells, cells.bool())
        pixels = inputs.pixels(image)
        pixels, used = to_format(pixels, inputs.camera(camera, pixels), self.image)
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(self._device)
        intrinsics = torch.tensor(used[2:], dtype=torch.float32, device=self._device)
        return self.model.encoders.encode_images(images[None, None], intrinsics[None, None])

    @contextmanager
    def _seeing(self, piece: Piece, view: BirdsEyeView, mounts: Tensor | None) -> Iterator[Tensor]:
        """Let the forward filter look at this view on this piece; its code (1)."""
        scene = make_scene(piece.features, view, self.model.encoders.sizes.grid, mounts)
        likelihood = self.model.smoother.forward_filter.likelihood
        assert isinstance(likelihood, MapLikelihood)
        with seeing(scene, likelihood):
            yield scene.codes()[0]

    def _seeds(self, seed: Tensor | None) -> tuple[Tensor, ...]:
        """Of the first particles, of the last ones, and of the run."""
        seed = ops.make_seed() if seed is None else seed
        if isinstance(seed, Tensor):
            if seed.dim() != 0:
                raise ValueError(f"seed: expected shape (), got {tuple(seed.shape)}")
            seed = seed.to(self._device)
        return ops.split_seed(seed, 3).unbind()

    def _check_resolution(self, pixels_per_metre: float) -> None:
        sizes = self.model.encoders.sizes
        expected = sizes.map_stride / sizes.grid.cell
        if not abs(pixels_per_metre / expected - 1) <= 1e-6:
            raise ValueError(f"map: expected {expected:g} pixels per metre, as in training, got {pixels_per_metre:g}")

    def _tensor(self, numbers: list[list[float]]) -> Tensor:
        return torch.tensor(numbers, dtype=self._dtype, device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


def _build(content: Mapping[str, Any]) -> Localizer:
    sizes = EncoderSizes(**(content["sizes"] | {"grid": Grid(*content["sizes"]["grid"])}))
    dynamics = [OdometryDynamics(reverse=reverse, **given) for given, reverse in zip(content["dynamics"], (False, True))]
    model = MapSmoother(Encoders(sizes), content["n_particles"], dynamics)
    model.load_state_dict(content["state_dict"])
    model.to(next(value.dtype for value in content["state_dict"].values() if value.is_floating_point()))  # not torch's default
    return Localizer(model, ImageFormat(*content["image"]))


def _options(dynamics: Any) -> dict[str, Any]:
    if type(dynamics) is not OdometryDynamics:
        raise ValueError(f"model: expected filters with OdometryDynamics, got {type(dynamics).__name__}")
    return {"scale": dynamics.scale.tolist(), "width": dynamics.network.first[0].out_features}


def _beside(views: list[BirdsEyeView]) -> BirdsEyeView:
    """Views (1, 1, ...) of V cameras as one of (1, 1, V, ...)."""
    return BirdsEyeView(*(torch.stack(parts, 2) for parts in zip(*views)))


def _places(poses: Tensor, mounts: Tensor | None, middle: tuple[float, float]) -> NDArray[np.float64]:
    """From where is seen, (..., 2) in the map's frame, at poses (..., 3) around this middle."""
    if mounts is not None:
        poses = mounted(poses.unsqueeze(-2), mounts)
    return poses[..., :2].double().cpu().numpy() + middle


def _moved(poses: Tensor, by: NDArray[np.float64]) -> Tensor:
    """Poses (..., 3) with these metres (2) added."""
    return poses + torch.tensor([*by, 0.0], dtype=poses.dtype, device=poses.device)


def _moved_state(state: FilterState, by: NDArray[np.float64]) -> FilterState:
    predicted, posterior = (p._replace(states=_moved(p.states, by)) for p in (state.predicted, state.posterior))
    return state._replace(predicted=predicted, posterior=posterior)


def _at(belief: Mixture, middle: Tensor) -> Mixture:
    """A belief around a middle (..., 2), as one in the frame of that, in float64; its means (..., N, 3) are broadcast to it."""
    offset = torch.nn.functional.pad(middle.double().to(belief.means.device), (0, 1))
    return Mixture(belief.means.double() + offset, belief.log_weights.double(), belief.bandwidths.double(), belief.space)


def _line(error: Exception) -> str:
    """An error of another library on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
