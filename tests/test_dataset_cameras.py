"""Cameras: angles against scipy, images against what a turned camera sees of a world of known colours."""

import math

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from small_scenes import picture, rotation

from mdps.datasets.camera import (
    Camera,
    camera_to_world,
    fit,
    heading_of,
    rectify,
    resize,
    resize_to_focal_length,
    roll_pitch_yaw,
    wrap_degrees,
    wrap_radians,
    yaw_of,
)


def test_yaw_is_clockwise_from_north_and_heading_counter_clockwise_from_east():
    yaws = {"north": 0, "east": 90, "south": -180, "west": -90}
    headings = {"north": math.pi / 2, "east": 0, "south": -math.pi / 2, "west": -math.pi}
    for name, yaw in yaws.items():
        assert heading_of(yaw) == pytest.approx(headings[name], abs=1e-12), name
        assert yaw_of(headings[name]) == pytest.approx(yaw, abs=1e-9), name
        ahead = camera_to_world(0, 0, yaw)[:, 2]  # East, North, up
        assert ahead == pytest.approx([math.cos(headings[name]), math.sin(headings[name]), 0], abs=1e-12), name


@pytest.mark.parametrize("yaw", [-539.0, -360.0, -180.0, 0.0, 179.5, 180.0, 359.0, 720.0, -1e-14])
def test_angles_are_wrapped(yaw):
    wrapped = float(wrap_degrees(yaw))
    assert -180 <= wrapped < 180
    assert math.remainder(wrapped - yaw, 360) == pytest.approx(0, abs=1e-9)
    assert -math.pi <= float(wrap_radians(math.radians(yaw))) < math.pi
    assert -math.pi <= float(heading_of(yaw)) < math.pi


def test_axes_of_a_level_camera():
    right, down, ahead = camera_to_world(0, 0, 0).T
    assert np.allclose([right, down, ahead], [[1, 0, 0], [0, 0, -1], [0, 1, 0]])


def test_signs_of_pitch_and_roll():
    assert camera_to_world(0, -10, 0)[2, 2] == pytest.approx(math.sin(math.radians(10)))  # negative: looks up
    right = camera_to_world(-10, 0, 0)[:, 0]
    assert right[2] == pytest.approx(-math.sin(math.radians(10)))  # negative: its right side points down, clockwise


def test_angles_against_scipy():
    angles = np.random.default_rng(0).uniform(-1, 1, (200, 3)) * [179, 89, 179]
    ours = camera_to_world(*angles.T)
    assert np.allclose(ours, [rotation(*a) for a in angles], atol=1e-12)
    theirs = (Rotation.from_euler("X", -90, degrees=True) * Rotation.from_matrix(ours).inv()).as_euler("YXZ", degrees=True)
    assert np.allclose(roll_pitch_yaw(ours), theirs, atol=1e-9)


def test_straight_down_has_no_nan():
    assert np.isfinite(roll_pitch_yaw(camera_to_world(0, 90, 30))).all()


CAMERA = Camera(160, 120, 100.0, 90.0, 82.0, 57.5)


@pytest.mark.parametrize("roll, pitch", [(0, 0), (7, 0), (0, -9), (-5, 8), (3.5, -12)])
def test_rectified_is_what_a_level_camera_sees(roll, pitch):
    seen = picture(rotation(roll, pitch, 25.0), *CAMERA)
    level = picture(rotation(0, 0, 25.0), *CAMERA)
    rectified = rectify(seen, CAMERA, roll, pitch)
    known = rectify(np.full_like(seen, 255), CAMERA, roll, pitch).min(-1) == 255
    assert known.mean() > 0.7 and known[50:70, 60:100].all()
    assert np.abs(rectified.astype(int) - level)[known].max() <= 3
    if pitch == -9:  # it looked up: its image hangs lower in the level camera's, whose bottom it never saw
        assert known[:60, 60:100].all() and not known[-1].any()


@pytest.mark.parametrize("angles", [(61, 0), (0, -75), (math.nan, 0)])
def test_not_rectified(angles):
    with pytest.raises(ValueError, match="roll, pitch: expected at most 60 degrees, got"):
        rectify(picture(rotation(0, 0, 0), *CAMERA), CAMERA, *angles)


@pytest.mark.parametrize("size", [(80, 60), (53, 40), (320, 240), (200, 90)])
def test_resized_is_what_the_resized_camera_sees(size):
    image, camera = resize(picture(rotation(1, 2, 3), *CAMERA), CAMERA, *size)
    assert image.shape == (size[1], size[0], 3)
    assert np.abs(image.astype(int) - picture(rotation(1, 2, 3), *camera)).max() <= 4


def test_focal_length():
    _, camera = resize_to_focal_length(picture(rotation(1, 2, 3), *CAMERA), CAMERA, 50.0)
    assert (camera.width, camera.height, camera.fx, camera.fy) == (80, 60, 50.0, 45.0)
    assert (camera.cx, camera.cy) == (40.75, 28.5)


@pytest.mark.parametrize("size", [(160, 160), (200, 100), (90, 150), (64, 48)])
def test_fitted_is_what_the_fitted_camera_sees(size):
    image, camera = fit(picture(rotation(1, 2, 3), *CAMERA), CAMERA, *size)
    assert image.shape == (size[1], size[0], 3)
    ones, _ = fit(np.full((120, 160, 3), 255, np.uint8), CAMERA, *size)
    known = ones[:, :, 0] == 255
    assert known.sum() == min(160, size[0]) * min(120, size[1])
    assert (image[known] == picture(rotation(1, 2, 3), *camera)[known]).all()
    assert not image[~known].any()
