#!/usr/bin/env bash
# Makes a folder with what runs the CPU kernels' tests in an emulated aarch64 CPU: Python and its libraries from Debian 12,
# and torch and the other packages from PyPI, for arm64. It takes some six gigabytes, as PyPI's torch comes with CUDA.
# On Debian, as root, with debootstrap, g++-aarch64-linux-gnu and qemu-user; run with a Python 3.11 or newer that has pip:
#   tests/aarch64.sh [FOLDER] [PYTHON]
# Afterwards: pytest --runslow tests/unit/engine/kernels/test_aarch64.py, with OATMILL_AARCH64 naming the folder, if it is
# not runs/aarch64.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/runs/aarch64}
python=${2:-$root/.venv/bin/python}
mkdir -p "$folder"

debootstrap --arch=arm64 --foreign --variant=minbase --include=python3.11,libgomp1 bookworm "$folder/root"
for package in "$folder"/root/var/cache/apt/archives/*.deb; do
    dpkg -x "$package" "$folder/root"
done

platforms=$(for minor in $(seq 17 39); do echo "--platform=manylinux_2_${minor}_aarch64"; done)
(cd "$root" && "$python" tools/requirements.py engine && printf '%s\n' ${TORCH:-torch==2.13.0} grpcio-tools httpx hypothesis \
    peft pytest pytest-asyncio pytest-timeout pytest-xdist setuptools) > "$folder/requirements.txt"
# shellcheck disable=SC2086
"$python" -m pip install --quiet --target "$folder/site" --python-version 3.11 --only-binary=:all: $platforms \
    --platform=manylinux2014_aarch64 -c "$root/constraints.txt" -r "$folder/requirements.txt"
