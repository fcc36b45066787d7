"""The Mixture Density Particle Smoother on a map: encoders, two filters, and the smoother that combines them.

Source: the paper, "City Scale Global Localization Task", and its appendix. Bandwidths start as in the authors' program: those
of the filters' beliefs, of what they resample from, and of the smoothed beliefs.
Cost: the encoders' on each image and map, and for each particle and step one `ops.pose_correlation` score.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from ..filters import FilterBeliefs, MixtureDensityParticleFilter
from ..smoothers import MixtureDensityParticleSmoother, SmootherBeliefs
from .birds_eye import Encoders
from .geometry import SPACE, BirdsEyeView
from .models import MapLikelihood, MapSmootherLikelihood, OdometryDynamics, Scene, make_scene, seeing

POSTERIOR_BANDWIDTH = (5.0, 5.0, 0.05**0.5)
RESAMPLING_BANDWIDTH = (1.5, 1.5, 0.1)
SMOOTHED_BANDWIDTH = (2.5, 2.5, 0.025**0.5)
MINIMUM_BANDWIDTH = (0.2, 0.2, 0.01)


class MapSmoother(nn.Module):
    """Localizes sequences of images on maps.

    Args:
        encoders: of maps and images; both filters and the smoother share them.
        n_particles: of each filter after its first step; the smoother has twice as many.
        dynamics: of the forward and the backward filter; None: `OdometryDynamics` of their own.
    """

    def __init__(self, encoders: Encoders, n_particles: int = 250, dynamics: Sequence[OdometryDynamics] | None = None) -> None:
        super().__init__()
        self.encoders = encoders
        forward_filter, backward_filter = (
            MixtureDensityParticleFilter(
                SPACE,
                move,
                MapLikelihood(),
                n_particles,
                reverse=reverse,
                posterior_bandwidth=POSTERIOR_BANDWIDTH,
                resampling_bandwidth=RESAMPLING_BANDWIDTH,
                minimum_bandwidth=MINIMUM_BANDWIDTH,
            )
            for move, reverse in zip(dynamics or (OdometryDynamics(), OdometryDynamics(reverse=True)), (False, True))
        )
        self.smoother = MixtureDensityParticleSmoother(
            forward_filter,
            backward_filter,
            MapSmootherLikelihood(),
            posterior_bandwidth=SMOOTHED_BANDWIDTH,
            minimum_bandwidth=MINIMUM_BANDWIDTH,
        )

    def observe(
        self,
        images: Tensor,
        camera: Tensor,
        classes: Tensor,
        pixels_per_metre: float,
        *,
        mounts: Tensor | None = None,
        chunk: int | None = None,
    ) -> Scene:
        """Encode what a batch of sequences sees.

        Args:
            images: uint8 (B, T, 3, H, W), level. camera: (B, T, 4), fx, fy, cx, cy in pixels. With mounts (B, T, V, ...).
            classes: uint8 (B, 3, H, W), the maps. pixels_per_metre: of these.
            mounts: (V, 3), of several cameras: metres ahead and to the left of the vehicle's pose, and radians to the left
                that they look. Their scores add up. None: one camera, at the pose.
            chunk: images that are encoded at once; None: all.

        Raises:
            ValueError: shapes.
        """
        if mounts is not None:
            if images.dim() != 6 or camera.dim() != 4 or images.size(2) != len(mounts):
                got = f"{tuple(images.shape)} and {tuple(camera.shape)}"
                raise ValueError(f"images, camera: expected (B, T, V, ...) with V = {len(mounts)}, that of mounts, got {got}")
            images, camera = images.flatten(1, 2), camera.flatten(1, 2)
        views = self.encoders.encode_images(images, camera, chunk=chunk)
        if mounts is not None:
            views = BirdsEyeView(*(x.unflatten(1, (-1, len(mounts))) for x in views))
        return make_scene(self.encoders.encode_map(classes, pixels_per_metre), views, self.encoders.sizes.grid, mounts)

    def filter(
        self,
        scene: Scene,
        initial: Tensor,
        final: Tensor,
        actions: Tensor,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[FilterBeliefs, FilterBeliefs]:
        """Beliefs of both filters alone; arguments as for `forward`."""
        with seeing(scene, *self._models()):
            return self.smoother.filter(scene.codes(), initial, final, actions, observed=observed, seed=seed)

    def smooth(
        self,
        scene: Scene,
        forward: FilterBeliefs,
        backward: FilterBeliefs,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Combine what `filter` returned; other arguments as for `forward`, which is both."""
        with seeing(scene, *self._models()):
            return self.smoother.smooth(forward, backward, scene.codes(), observed=observed, seed=seed)

    def forward(
        self,
        scene: Scene,
        initial: Tensor,
        final: Tensor,
        actions: Tensor,
        observed: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> SmootherBeliefs:
        """Smooth whole sequences.

        Args:
            scene: of B sequences of T steps, from `observe`.
            initial, final: (B, N, 3), particles at the first and at the last step, of any number; `around`, `anywhere`.
            actions: (B, T, 3): odometry that led to each step, East, North [m] and turn [rad].
            observed: bool (B, T): False where there is no image. seed: int64 () or (B,).
        """
        with seeing(scene, *self._models()):
            return self.smoother(scene.codes(), initial, final, actions, observed=observed, seed=seed)

    def _models(self) -> tuple[MapLikelihood | MapSmootherLikelihood, ...]:
        s = self.smoother
        return s.forward_filter.likelihood, s.backward_filter.likelihood, s.likelihood  # type: ignore[return-value]
