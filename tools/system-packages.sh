#!/bin/sh
# Installs the Debian packages that a bare machine lacks.
# Usage: tools/system-packages.sh PYTHON venv [compiler]
# venv: for that interpreter. compiler: C++, and Python's headers, for the CPU kernels.
set -eu
python=$1
shift

missing=""
for wanted in "$@"; do
    case $wanted in
    venv)
        "$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
        ;;
    compiler)
        command -v g++ >/dev/null || missing="$missing g++"
        header='import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
        "$python" -c "$header" 2>/dev/null || missing="$missing python3-dev"
        ;;
    esac
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "missing system packages:$missing; install them (Debian: sudo apt-get install$missing) and run make again" >&2
    exit 1
fi
echo "installing: system packages:$missing"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
