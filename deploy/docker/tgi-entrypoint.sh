#!/bin/sh
# MODEL_ID and the other settings reach the launcher through the environment; TGI_PARAMS holds more flags, which is
# why it is left to be split into words.
set -eu
# shellcheck disable=SC2086
exec text-generation-launcher --hostname 0.0.0.0 --port 80 --num-shard "${GPU_COUNT:-1}" ${TGI_PARAMS:-} "$@"
