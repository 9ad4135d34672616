#!/bin/sh
# Installs the Debian packages that a bare machine lacks: venv for the interpreter, a C++ compiler for the CPU kernels.
# Usage: tools/system-packages.sh [python3]
set -eu
python=${1:-python3}

missing=""
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
command -v g++ >/dev/null || missing="$missing g++"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
    2>/dev/null || missing="$missing python3-dev"
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "missing system packages:$missing; install them (Debian: sudo apt-get install$missing) and run make again" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
