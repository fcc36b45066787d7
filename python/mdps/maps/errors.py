"""The one error of files: a single line that names the file, what was expected and what came."""


class DataError(ValueError):
    """A file that cannot be read as what it should be. Nothing in it was executed."""
