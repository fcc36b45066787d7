"""What readers of maps and data sets share: the error of bad files, and OpenCV where it is installed."""

from typing import Any


class DataError(ValueError):
    """A file that cannot be read as what it should be, in one line that names it. Nothing in it was executed."""


def opencv() -> Any:
    """Return the module cv2, which draws maps, and reads and warps images.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import cv2
    except ImportError:
        raise ImportError("images and maps need OpenCV: pip install opencv-python-headless") from None
    return cv2
