"""Ways to run a `transformers` model on batches that change at every step."""

import logging
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends import fuse, limit_threads, optimise, pack_codes, unpack
from tgi_server.engine.backends.attention import create_attention_backend
from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.config import KV_CACHE_DTYPES, EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import LinearFactory, linear_factory
from tgi_server.engine.linear.gpu import gpu_linear_factory
from tgi_server.engine.linear.grouped_experts import group_experts
from tgi_server.engine.linear.onednn import has_products
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.models.families import spec_of
from tgi_server.engine.models.spec import DecoderSpec, NoSpec
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.progress import progress
from tgi_server.engine.runners.base import Runner
from tgi_server.engine.runners.padded import PaddedRunner
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.runners.probe import LogitsProbe, probe_paged_path
from tgi_server.loading import PACKING

logger = logging.getLogger(__name__)


@torch.inference_mode()
def create_runner(model: PreTrainedModel, config: EngineConfig, *, alone: bool = True) -> Runner:
    """Returns a paged runner when the model can take that path, else a padded one.

    alone: False: this process runs a larger model, too, and the number of threads suits that one.

    Raises UnsupportedModel when the engine's own layers do not compute what the model's did, or when the weights
    cannot be quantised as asked. All shards of a model come to the same decision.
    """
    progress(PACKING)
    on_cpu = model.device.type == "cpu" and config.custom_kernels
    if on_cpu and alone:
        limit_threads(model)
    linear = linear_factory(
        model,
        model.dtype,
        config.quantize,
        custom_kernels=on_cpu,
        group=config.group,
        pinned=config.linear_kernels,
    )
    runner = _runner(model, config, linear, on_cpu=on_cpu)
    if on_cpu:
        runner.linear_kernels = str(linear)
    malloc_trim()
    return runner


def pack_linears(module: nn.Module, model: PreTrainedModel, config: EngineConfig) -> None:
    """Packs linear layers that are computed beside a model, on a CPU; their weights stay as they are."""
    if model.device.type == "cpu" and config.custom_kernels:
        linear = linear_factory(module, model.dtype, None, custom_kernels=True, pinned=config.linear_kernels)
        optimise(module, linear=linear)


def _runner(model: PreTrainedModel, config: EngineConfig, linear: LinearFactory, *, on_cpu: bool) -> Runner:
    group = config.group
    fallbacks = []
    if on_cpu and not load_kernels():
        fallbacks.append("the CPU kernels are not available, so plain torch does their work")
    if model.device.type == "cuda" and config.custom_kernels:
        fallbacks += group_experts(model, model.dtype, group)
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    probe = probe_paged_path(model, group)
    if probe is None:
        if config.kv_cache_dtype is not None:
            raise UnsupportedModel(
                f"--kv-cache-dtype {config.kv_cache_dtype} is for models whose batches are paged; "
                f"{model.config.model_type} models run in padded batches, so leave it out"
            )
        _warn_no_graphs(config, "on the padded path")
        if on_cpu:
            optimise(model, linear=linear)
            if not has_products(model.dtype):  # then torch has no fast attention of this dtype either
                model.float()
        try:
            return PaddedRunner(model, config.memory_fraction, config.cpu_memory, group, fallbacks)
        except UnsupportedModel:
            if not on_cpu:
                raise
            unpack(model)
        return PaddedRunner(model, config.memory_fraction, config.cpu_memory, group, fallbacks)
    kv_format = _kv_format(model, config)
    backend = create_attention_backend(
        probe.shape, model.device, model.dtype, kv_format, custom_kernels=config.custom_kernels
    )
    if model.device.type == "cuda" and config.custom_kernels:
        backend, linear, slower = prove_kernels(model, backend, group)
        fallbacks += slower
    if model.device.type != "cuda" or not backend.any_lengths:
        _warn_no_graphs(config, f"on {'a CPU' if model.device.type == 'cpu' else 'a GPU in plain torch'}")
    whole = None
    if on_cpu:
        if config.kv_cache_dtype is not None:
            probe = LogitsProbe(model, group, kv_format=kv_format)
        spec = _spec(model) if isinstance(backend, CpuAttention) else None
        whole = optimise(model, spec, probe.variants, linear=linear, group=group)
        if fault := probe.fault(backend, "the CPU kernels", linear.rounding, whole):
            raise UnsupportedModel(f"{model.config.model_type}: {fault}; start with --disable-custom-kernels")
    memory = config.memory_fraction, config.cpu_memory
    runner = PagedRunner(model, backend, *memory, group, config.cuda_graphs, weight_bytes, fallbacks, whole)
    if model.device.type == "cuda" and config.custom_kernels:
        runner.linear_kernels = str(linear)
    return runner


def _spec(model: PreTrainedModel) -> DecoderSpec | None:
    try:
        return spec_of(model.config)
    except NoSpec as reason:
        logger.info("%s runs in the layers of transformers: %s", model.config.model_type, reason)
        return None


def _warn_no_graphs(config: EngineConfig, where: str) -> None:
    if config.cuda_graphs:
        logger.warning("--cuda-graphs has no effect: decoding %s runs without CUDA graphs", where)


def prove_kernels(
    model: PreTrainedModel, backend: AttentionBackend, group: ShardGroup | None = None
) -> tuple[AttentionBackend, LinearFactory, list[str]]:
    """Has a model on the paged path computed by the kernels of a GPU, where they compute what they should.

    Fuses the decoder layers that are known, and packs quantised weights; the backend's blocks are allocated anew.
    Returns the backend to attend with, which is in plain torch where the other fails, what made the linear layers, and
    the fall-backs. All shards do the same.
    """
    linear, fallbacks = gpu_linear_factory(model, model.dtype, group)
    if type(backend) is GatherAttention:
        missing = "the attention kernels are not for this device or model, or Triton is missing"
        fallbacks.append(_warned(f"attention runs in plain torch, which is slower: {missing}"))
    else:
        probe = LogitsProbe(model, group, long=True, kv_format=backend.kv_format)
        if fault := probe.fault(backend, type(backend).__name__):
            backend = GatherAttention(backend.shape, backend.device, backend.dtype, backend.kv_format)
            fallbacks.append(_warned(f"attention runs in plain torch, which is slower: {fault}"))
        elif (spec := _spec(model)) is not None and (
            fault := fuse(
                model, spec, probe.variants, partial(probe.fault, backend, "fused layers", linear.rounding), linear
            )
        ):
            fallbacks.append(_warned(f"decoder layers are not fused, which is slow: {fault}"))
    pack_codes(model, linear)
    return backend, linear, fallbacks


def _warned(fallback: str) -> str:
    logger.warning(fallback)
    return fallback


def _kv_format(model: PreTrainedModel, config: EngineConfig) -> KVFormat:
    if config.kv_cache_dtype is None:
        return KVFormat(model.dtype)
    return KVFormat(KV_CACHE_DTYPES[config.kv_cache_dtype], getattr(model, "kv_scales", {}))
