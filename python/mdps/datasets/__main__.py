"""python -m mdps.datasets check PATH, or show PATH --sequence NAME: data sets looked at by eye and by numbers."""

import argparse
import sys
from collections.abc import Sequence

from ..maps.errors import DataError
from .health import check
from .viewer import show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it could, else 1 and one line that says why not."""
    parser = argparse.ArgumentParser(prog="python -m mdps.datasets", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="check | show")
    checking = commands.add_parser("check", help="one page: what is there, missing, out of range; and a fingerprint")
    checking.add_argument("path", help="folder of MGL (or of one scene) or KITTI")
    showing = commands.add_parser("show", help="a sequence as a picture or a film: images, map, track, odometry")
    showing.add_argument("path", help="folder of MGL (or of one scene) or KITTI")
    showing.add_argument(
        "--sequence", default="", help="its name, or the beginning of it: scene/track/first frame; none: the first"
    )
    showing.add_argument("--length", type=int, default=10, help="frames in a sequence (default: 10)")
    showing.add_argument("--out", default="sequence.png", help=".png or .mp4 (default: sequence.png)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            print(check(options.path))
        else:
            name = show(options.path, options.sequence, options.out, length=options.length)
            print(f"{options.out}: {name}")
    except (DataError, ValueError, ImportError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
