#!/bin/sh
# The launcher reads its settings from the environment (a flag --a-b is the variable A_B); TGI_PARAMS holds more flags,
# which is why it is left to be split into words, and flags win. Here are the defaults of a container.
set -eu
export PORT="${PORT:-80}"
[ -n "${NUM_SHARD:-}${SHARDED:-}" ] || export NUM_SHARD="${GPU_COUNT:-1}"
export PACKED_WEIGHTS_CACHE="${PACKED_WEIGHTS_CACHE:-${HUGGINGFACE_HUB_CACHE:-/data}/packed}"
if [ ! -w "${HUGGINGFACE_HUB_CACHE:-/data}" ]; then
    echo "tgi: user $(id -u):$(id -g) cannot write to ${HUGGINGFACE_HUB_CACHE:-/data}, so nothing can be downloaded or" \
        "converted; on the host, run: sudo chown -R $(id -u):$(id -g) shared/file_system/downloads/tgi" >&2
fi
[ -w "${TRITON_HOME:-/tmp}" ] || export TRITON_HOME=/tmp
# On GPUs the kernels of humming-kernels and flash-attn-4 are kept beside Triton's.
export HUMMING_CACHE_DIR="${HUMMING_CACHE_DIR:-${TRITON_HOME:-/tmp}/.humming}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-${TRITON_HOME:-/tmp}/.flash_attention}"
# shellcheck disable=SC2086
exec text-generation-launcher ${TGI_PARAMS:-} "$@"
