"""Flags of other servers (vLLM, SGLang, llama.cpp), with what to do here: for errors and for the documents."""

import re
from collections.abc import Container
from typing import Final

# By what to do. `--FLAG` in it is a flag of ours; programs without it do not give the answer.
_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "use --model-id MODEL": ("--model", "-m", "--model-path", "-hf", "-hfr", "--hf-repo"),
    "use --gguf-file NAME": ("-hff", "--hf-file"),
    "use --served-model-name NAME": ("--alias", "-a"),
    "use --tokenizer-name MODEL": ("--tokenizer", "--tokenizer-path"),
    "use --tokenizer-config-path FILE, which may be a bare template": ("--chat-template", "--chat-template-file"),
    "use --hostname ADDRESS": ("--host",),
    "use --num-shard N": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "use --num-shard N, which cuts every layer": ("--pipeline-parallel-size", "-pp", "--pp-size"),
    "start one server for each copy, behind a load balancer": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
    "use --num-nodes N": ("--nnodes",),
    "use --master-addr ADDRESS": ("--dist-init-addr",),
    "use --max-total-tokens N": ("--max-model-len", "--context-length", "--ctx-size", "-c"),
    "use --max-batch-size N": ("--max-num-seqs", "--max-running-requests"),
    "use --max-batch-prefill-tokens N": (
        *("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
        *("--batch-size", "-b", "--ubatch-size", "-ub"),
    ),
    "leave it out: as many requests run as fit; --max-concurrent-requests bounds them": (
        *("--parallel", "-np", "--cont-batching", "-cb"),
    ),
    "use --cuda-memory-fraction F": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "leave it out: all layers run on the GPU, or on the CPU if there is none": (
        *("--n-gpu-layers", "-ngl", "--gpu-layers", "--device"),
    ),
    "leave it out: nothing is swapped out; a preempted request is computed again": ("--swap-space",),
    "not supported: the weights must fit; use --quantize KIND or --num-shard N": ("--cpu-offload-gb",),
    "leave it out: the server chooses the size of KV blocks": ("--block-size", "--page-size"),
    "use --kv-cache-dtype fp8": ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
    "use --quantize KIND; quantized checkpoints need no flag": ("--quantization", "-q"),
    "use --cuda-graphs 0": ("--enforce-eager", "--disable-cuda-graph"),
    "use --cuda-graphs SIZES": ("--cuda-graph-max-bs", "--compilation-config"),
    "use --no-prefix-caching": ("--no-enable-prefix-caching", "--disable-radix-cache"),
    "leave it out: prefixes are cached unless --no-prefix-caching is given": ("--enable-prefix-caching",),
    "leave it out: long prompts are always computed in chunks": ("--enable-chunked-prefill",),
    "leave it out: attention is chosen at load": ("--flash-attn", "-fa", "--attention-backend"),
    "use --speculative-model MODEL, or --speculate N without a draft model": (
        *("--speculative-config", "--speculative-draft-model-path", "--model-draft", "-md"),
    ),
    "use --speculate N": ("--speculative-num-draft-tokens", "--draft-max", "--draft"),
    "use --lora-adapters NAME=FOLDER": ("--lora-modules", "--lora-paths", "--lora", "--enable-lora"),
    "use --embedding-model-id MODEL": ("--embedding", "--embeddings", "--is-embedding", "--task", "--runner"),
    "use --rerank-model-id MODEL": ("--rerank", "--reranking"),
    "not supported: GGUF models have no images here; serve the model's safetensors": ("--mmproj",),
    "leave it out: reasoning is always separated; --reasoning-parser NAME says how": (
        *("--enable-reasoning", "--reasoning-format"),
    ),
    "leave it out: grammars always work": (
        *("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"),
    ),
    "leave it out: requests have it (`response_format`)": ("--grammar", "--json-schema"),
    "leave it out: requests have it (`seed`)": ("--seed", "--random-seed"),
    "leave it out: requests have it (`temperature`)": ("--temp",),
    "leave it out: requests have it (`max_tokens`)": ("--n-predict", "-n"),
    "leave it out: templates are always Jinja": ("--jinja",),
    "leave it out: the server uses the cores that it may use (taskset, containers)": ("--threads", "-t"),
    "leave it out: weights are read once and stay in memory": ("--mlock", "--no-mmap"),
    "leave it out: the kinds of files are recognized": ("--load-format", "--config-format", "--tokenizer-mode"),
    "leave it out: the launcher starts the shards": ("--distributed-executor-backend",),
    "not supported: change the model's config.json": ("--hf-overrides",),
    "use --huggingface-hub-cache FOLDER": ("--download-dir",),
    "use --cors-allow-origin ORIGINS": ("--allowed-origins",),
    "use --client-timeout SECONDS": ("--timeout",),
    "use a TLS proxy in front of the server": ("--ssl-keyfile", "--ssl-certfile", "--ssl-key-file", "--ssl-cert-file"),
    "use a proxy that removes the path": ("--root-path", "--api-prefix"),
    "use --log-level LEVEL": ("--uvicorn-log-level", "--verbose", "-v"),
    "leave it out: prompts are never logged": ("--disable-log-requests", "--enable-log-requests", "--log-requests"),
    "leave it out: /metrics always has them": ("--metrics", "--enable-metrics", "--disable-log-stats"),
}
FOREIGN_FLAGS: Final = {flag: answer for answer, flags in _FLAGS.items() for flag in flags}


def foreign_answer(flag: str, own: Container[str]) -> str | None:
    """Returns what to do instead of a flag; None if it is not known, or if the program lacks a flag for it.

    own: the program's flags.
    """
    answer = None if flag in own else FOREIGN_FLAGS.get(flag)
    return answer if answer and all(name in own for name in named_flags(answer)) else None


def named_flags(answer: str) -> list[str]:
    return re.findall(r"--[a-z-]+", answer)
