"""Runs the benchmarks of this folder, each in its own process: python tests/bench [name ...]."""

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return how many failed."""
    here = Path(__file__).resolve().parent
    known = sorted(p.stem for p in here.glob("[a-z]*.py") if "\ndef main(" in p.read_text())
    if unknown := set(names) - set(known):
        sys.exit(f"bench: expected names among {known}, got {sorted(unknown)}")
    failed = 0
    for name in names or known:
        print(f"\n# {name}\n", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=here.parent).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
