#!/bin/bash
# Builds the package with its CUDA kernels from the working tree and runs tests/gpu/check.py on this machine's GPU, within eight
# minutes: bash tests/gpu/check.sh [arguments of check.py]. The results go to tests/gpu/results/, or to the folder $OUT.
#
# Needs nvcc, gcc, a torch with CUDA, pip, scikit-build-core, pybind11, cmake, ninja, pytest, scipy and mpmath; nothing from the
# network. The headers of cuRAND come from the toolkit or from torch's nvidia-curand. PYTHON: the interpreter, if not python3.
set -euo pipefail
SECONDS=0
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
out="${OUT:-tests/gpu/results}"
most=480

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if ! command -v nvcc > /dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
    export PATH="$PATH:/usr/local/cuda/bin"
fi
if [ -z "${MDPS_COMMIT:-}" ]; then
    MDPS_COMMIT="$(git rev-parse --short=12 HEAD 2> /dev/null || echo unknown)"
    [ -z "$(git status --porcelain -- . ':!tests/gpu/results' 2> /dev/null)" ] || MDPS_COMMIT="$MDPS_COMMIT, edited"
fi
export MDPS_COMMIT
export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} --threads 4" # the architectures of a file at once

echo "check: building with $(nvcc --version | tail -n 1)"
if ! "$python" -m pip install --no-build-isolation --no-deps --no-index --no-cache-dir --disable-pip-version-check \
    --target "$work/site" -C "build-dir=$work/build" -C cmake.define.MDPS_CUDA=ON . > "$work/build.log" 2>&1; then
    tail -n 60 "$work/build.log"
    echo "check: the build failed"
    exit 1
fi
export MDPS_BUILD_SECONDS="$SECONDS"
echo "check: built in $SECONDS s"
PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 \
    "$python" tests/gpu/check.py --out "$out" --seconds "$((most - SECONDS))" "$@"
