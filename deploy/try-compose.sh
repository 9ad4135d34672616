#!/bin/bash
# Builds the images, runs the compose stack on the bundled demo model with an API key, and tries it: answers, tests, a
# killed model server, recovery, an empty key, a wrong flag, a model of .bin files, the unit tests in the tester. Needs no
# network but a package index for pip and apt, and no image registry: where the base image cannot be pulled, one is made
# with debootstrap, with Debian's own Python 3.11.2.
#
# Usage: deploy/try-compose.sh [--keep]      --keep leaves the stack running
# Skips with a message, and status 0, where no container engine can be had.
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=$(sed -n 's/^ARG BASE=//p' deploy/docker/tgi.Dockerfile)
STATE=${STATE:-/var/tmp/oatmill-compose}
# Seconds: bounds of waits that end as soon as there is something to see; a machine with much else to do needs most of them.
ENGINE_SECONDS=180
HEALTHY_SECONDS=900
GIVEN_UP_SECONDS=600
WHEELS_PORT=${WHEELS_PORT:-18765}
keep=${1:-}
engine_pid=
wheels_pid=
build_flags=(--network host)
stack=tests/integration/stack
models=shared/file_system/downloads/tgi
bin_model=$models/local/try-compose-bin
export API_KEY=${API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

say() { printf '\n== %s\n' "$*"; }
skip() { echo "skipped: $*"; exit 0; }

compose() {
    if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi
}

finish() {
    status=$?
    [ "$keep" = --keep ] || { compose --profile test down --volumes --timeout 30 >/dev/null 2>&1 || true; }
    rm -rf "$bin_model"
    [ -z "$wheels_pid" ] || kill "$wheels_pid"
    if [ -n "$engine_pid" ] && [ "$keep" != --keep ]; then kill "$engine_pid"; wait "$engine_pid" 2>/dev/null || true; fi
    exit $status
}

need_engine() {
    command -v docker >/dev/null || skip "there is no docker command"
    compose version >/dev/null 2>&1 || skip "there is neither docker compose nor docker-compose"
    docker info >/dev/null 2>&1 && return
    command -v dockerd >/dev/null || skip "no container engine runs, and there is no dockerd to start"
    [ "$(id -u)" = 0 ] || skip "no container engine runs, and only root can start one"
    say "starting dockerd"
    mkdir -p "$STATE"
    dockerd --data-root "$STATE/docker" >"$STATE/dockerd.log" 2>&1 &
    engine_pid=$!
    until=$((SECONDS + ENGINE_SECONDS))
    while [ $SECONDS -lt $until ]; do
        docker info >/dev/null 2>&1 && return
        kill -0 "$engine_pid" 2>/dev/null || { engine_pid=; skip "dockerd does not start; see $STATE/dockerd.log"; }
        sleep 1
    done
    skip "dockerd does not answer; see $STATE/dockerd.log"
}

need_base_image() {
    docker image inspect "$BASE" >/dev/null 2>&1 && return
    docker pull --quiet "$BASE" 2>/dev/null && return
    command -v debootstrap >/dev/null || skip "$BASE cannot be pulled, and there is no debootstrap to make one like it"
    say "making a base image with debootstrap, since $BASE cannot be pulled"
    root=$(mktemp -d "$STATE/base.XXXX")
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >"$STATE/debootstrap.log"
    # The image reaches the package indexes in the way that this machine does.
    for file in /etc/ssl/certs/ca-certificates.crt /etc/pip.conf /etc/apt/sources.list /etc/apt/apt.conf.d /etc/apt/sources.list.d; do
        [ -e "$file" ] && cp -rL --parents "$file" "$root"
    done
    [ -e "$HOME/.config/pip/pip.conf" ] && install -D "$HOME/.config/pip/pip.conf" "$root/root/.config/pip/pip.conf"
    tar -C "$root" -c . | docker import - "$BASE" >/dev/null
    rm -rf "$root"
}

# Wheels that this machine keeps in a folder (pip's find-links) are offered to the builds over loopback, so that they
# weigh on no image.
offer_wheels() {
    folder=$(pip config list 2>/dev/null | sed -n "s/^.*find-links='\(.*\)'$/\1/p" | head -n 1)
    [ -d "$folder" ] || return 0
    python3 -m http.server --bind 127.0.0.1 --directory "$folder" "$WHEELS_PORT" >/dev/null 2>&1 &
    wheels_pid=$!
    build_flags+=(--build-arg "PIP_FIND_LINKS=http://127.0.0.1:$WHEELS_PORT/")
}

build() {
    say "building the images"
    offer_wheels
    for target in tgi tester; do
        DOCKER_BUILDKIT=0 docker build --quiet "${build_flags[@]}" -f deploy/docker/tgi.Dockerfile --target $target -t oatmill-$target .
    done
    DOCKER_BUILDKIT=0 docker build --quiet "${build_flags[@]}" -f deploy/docker/llm_functionalities.Dockerfile \
        -t oatmill-llm-functionalities .
    docker images --format '{{.Repository}}: {{.Size}}' | grep '^oatmill'
}

wait_until_healthy() {
    until=$((SECONDS + HEALTHY_SECONDS))
    while [ $SECONDS -lt $until ]; do
        [ "$(docker inspect --format '{{.State.Health.Status}}' "$(compose ps -q "$1")")" = healthy ] && return
        sleep 1
    done
    compose logs "$1" | tail -20
    echo "$1 is not healthy after $HEALTHY_SECONDS s" >&2
    return 1
}

state_of() { docker inspect --format "{{$2}}" "$(compose ps -aq "$1" 2>/dev/null || compose ps -q "$1")"; }

# Writes the demo model with .bin weights into the folder that the server sees as /models, and lets the container's user
# write what it converts.
make_bin_model() {
    mkdir -p "$bin_model"
    chown 1000 "$bin_model" "$models/hub"
    docker run --rm --user 1000 -v "$PWD/$bin_model:/target" --entrypoint python oatmill-tgi -c '
import shutil
import torch
from safetensors.torch import load_file
from tgi_server import demo_model
for file in demo_model.PATH.iterdir():
    if file.suffix != ".safetensors":
        shutil.copyfile(file, f"/target/{file.name}")
torch.save(load_file(demo_model.PATH / "model.safetensors"), "/target/pytorch_model.bin")'
}

need_engine
trap finish EXIT
mkdir -p "$STATE"
need_base_image
build
say "starting the stack, as a user who may not write to this folder's files"
compose up -d --no-build
wait_until_healthy tgi
wait_until_healthy llm_functionalities
compose logs tgi | grep -i 'compiling' && { echo "it compiles kernels, which the image should have" >&2; exit 1; }
say "over HTTP, on port ${TGI_PORT:-8081}"
curl -sS -m 120 "http://127.0.0.1:${TGI_PORT:-8081}/generate" -H 'content-type: application/json' \
    -H "authorization: Bearer $API_KEY" \
    -d '{"inputs": "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n", "parameters": {"max_new_tokens": 40}}'
echo
say "the tests of the running stack"
compose run --rm tester --runslow -v $stack/test_llm.py
compose run --rm tester --runslow $stack/test_key.py
say "killing the model server: calls come back empty, and full again once it is back"
docker kill "$(compose ps -q tgi)" >/dev/null
compose run --rm tester --runslow $stack/test_away.py
compose up -d --no-build tgi >/dev/null
wait_until_healthy tgi
compose run --rm tester --runslow $stack/test_llm.py
say "a server whose key is empty does not start"
status=0
API_KEY='' compose run --rm --no-deps tgi || status=$?
[ "$status" = 2 ] || { echo "it ended with $status" >&2; exit 1; }
say "a wrong flag does not restart for ever"
TGI_PARAMS=--no-such-flag compose up -d --no-build tgi >/dev/null
until=$((SECONDS + GIVEN_UP_SECONDS))
while [ $SECONDS -lt $until ] && [ "$(state_of tgi .State.Status)" != exited ]; do
    sleep 1
done
compose logs --tail 1 tgi
echo "$(state_of tgi .State.Status) with $(state_of tgi .State.ExitCode) after $(state_of tgi .RestartCount) restarts"
[ "$(state_of tgi .State.Status) $(state_of tgi .State.ExitCode)" = "exited 2" ]
say "a model of .bin files on the read-only /models is converted into /data"
make_bin_model
MODEL_ID=/models/$(basename "$bin_model") compose up -d --no-build tgi >/dev/null
wait_until_healthy tgi
compose logs tgi | grep 'converted into /data'
compose run --rm tester --runslow $stack/test_llm.py
rm -rf "$models/hub/converted"
say "the unit tests, in the tester"
compose run --rm tester
say "everything that was tried works"
