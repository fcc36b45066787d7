"""Real files for tests that want some; the repository holds none."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def real_data(name: str) -> Path:
    """The path of a real file or folder, such as "osm/berlin_neukolln.osm", or skip the test.

    Looks in the folder that the environment variable MDPS_REAL_DATA names, else in ../shared/data beside the repository.
    """
    path = Path(os.environ.get("MDPS_REAL_DATA", _BESIDE)) / name
    if not path.exists():
        pytest.skip(f"{path} is not here (MDPS_REAL_DATA names another folder)")
    return path
