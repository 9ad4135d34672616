"""Ways to run a `transformers` model on batches that change at every step."""

import torch
from transformers import PreTrainedModel

from tgi_server.engine.attention import create_attention_backend
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.cpu import limit_threads, linear_layer, optimise, unpack
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.padded import PaddedRunner
from tgi_server.engine.models.paged import PagedRunner
from tgi_server.engine.models.probe import probe_kv_shape, same_logits
from tgi_server.engine.models.runner import Runner


@torch.inference_mode()
def create_runner(model: PreTrainedModel, config: EngineConfig) -> Runner:
    """The paged way when the model can take it, else the padded one.

    Raises UnsupportedModel when the engine's own layers do not compute what the model's did, or when the weights
    cannot be quantised as asked. All shards of a model come to the same decision.
    """
    group = config.group
    on_cpu = model.device.type == "cpu" and config.custom_kernels
    linear = linear_layer(config.quantize, model.dtype, custom_kernels=on_cpu)
    if on_cpu:
        limit_threads(model)
    shape = probe_kv_shape(model, group)
    if shape is None:
        if on_cpu:
            optimise(model, linear=linear)
        try:
            return PaddedRunner(model, config.memory_fraction, config.cpu_memory, group)
        except UnsupportedModel:
            if not on_cpu or config.quantize:
                raise
            unpack(model)
        return PaddedRunner(model, config.memory_fraction, config.cpu_memory, group)
    backend = create_attention_backend(shape, model.device, model.dtype, custom_kernels=config.custom_kernels)
    if on_cpu:
        with same_logits(model, backend, linear.rounding, group) as variants:
            optimise(model, backend, variants, linear)
    return PagedRunner(model, backend, config.memory_fraction, config.cpu_memory, group)
