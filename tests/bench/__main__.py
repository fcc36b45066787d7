"""Runs every benchmark of this folder, one after the other, each in its own process: python tests/bench [name ...]."""

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return how many failed."""
    here = Path(__file__).parent
    known = sorted(p.stem for p in here.glob("[a-z]*.py"))
    if unknown := set(names) - set(known):
        sys.exit(f"bench: expected names among {known}, got {sorted(unknown)}")
    failed = 0
    for name in names or known:
        print(f"\n# {name}\n", flush=True)
        failed += subprocess.run([sys.executable, "-c", f"import {name}; {name}.main()"], cwd=here).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
