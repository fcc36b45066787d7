"""What the readers here need before anything else: the error of bad data, and OpenCV where it is installed."""

from typing import Any

from ..maps import DataError as DataError


def opencv() -> Any:
    """Return the module cv2, which reads and warps images.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import cv2
    except ImportError:
        raise ImportError("images need OpenCV: pip install 'mdps[localization]'") from None
    return cv2
