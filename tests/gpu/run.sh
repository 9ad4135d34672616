#!/usr/bin/env bash
# Checks, or measures, the server on a machine with a GPU. Installs nothing from a network, and takes ten minutes at most.
#
#   tests/gpu/run.sh first            what to run first: facts about the kernels, correctness, speed, HTTP; the shortest of each
#   tests/gpu/run.sh next             what has not run since the last run on a GPU: speed, variants, router, correctness
#   tests/gpu/run.sh check            correctness; exit code 0 when all that ran passed
#   tests/gpu/run.sh bench            speed, beside transformers and the floor
#   tests/gpu/run.sh check attention  only what has "attention" in its name
#
# PYTHON: the interpreter; default: .venv's, or python3. WHEELS: a folder of wheels that are unpacked for this run only
# (default: runs/wheels). OUT: where logs and numbers go (default: runs/gpu). SECONDS_AT_MOST: default 570.
# Exit codes: 1 something failed, 2 a wrong call, 3 no GPU here, or nothing could be run.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-}
for candidate in .venv/bin/python python3; do
    [[ -n $python ]] || ! "$candidate" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || python=$candidate
done
python=${python:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

wheels=${WHEELS:-runs/wheels}
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export OUT=${OUT:-runs/gpu} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$OUT"
status=0
"$python" -m tests.gpu.run "$@" || status=$?
exit "$status"
