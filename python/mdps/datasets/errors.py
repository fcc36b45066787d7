"""What goes wrong with data on disk: one kind of error, with one line that names the file and the entry."""

from types import ModuleType


class DataError(ValueError):
    """A file or folder that cannot be used: the message names it, says what was expected and what came."""


def opencv() -> ModuleType:
    """OpenCV, which reads and warps images.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise ImportError("images need OpenCV: pip install 'mdps[localization]'") from error
    return cv2
