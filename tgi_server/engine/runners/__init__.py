"""Ways to run a `transformers` model on batches that change at every step."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tgi_server.engine.backends import Backend, create_backend
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.models.families import family_of, spec_of
from tgi_server.engine.models.spec import DecoderSpec, NoSpec
from tgi_server.engine.progress import progress
from tgi_server.engine.runners.base import Runner
from tgi_server.engine.runners.padded import PaddedRunner
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.loading import PACKING

logger = logging.getLogger(__name__)


@torch.inference_mode()
def create_runner(model: PreTrainedModel, config: EngineConfig, *, alone: bool = True) -> Runner:
    """Returns a paged runner if the model can take that path, and a padded one otherwise.

    alone: False if this process also runs a larger model, whose number of threads is used.

    Raises UnsupportedModel when the engine's own layers do not compute what the model's did, or when the weights
    cannot be quantised in this format. All shards of a model make the same choice.
    """
    progress(PACKING)
    weights = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    weight_bytes = sum(holder.nbytes for holder in (*model.parameters(), *model.buffers(), *weights))
    backend = create_backend(model, config, alone=alone)
    family = family_of(model.config.get_text_config(decoder=True))
    paged = backend.create_model(family, _spec(model))
    if paged is None:
        runner: Runner = _padded(model, backend, config)
    else:
        if not paged.attention.any_lengths:
            _warn_no_graphs(config, backend.where)
        runner = PagedRunner(paged, backend, config.group, weight_bytes)
    malloc_trim()
    return runner


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The parts of a runner, for a later start. weight_bytes: size of the checkpoint's weights."""

    model: CpuModel
    backend: Backend
    weight_bytes: int


def stored_model(runner: Runner, model: PreTrainedModel) -> StoredModel | None:
    """Returns the parts from which `restored_runner` makes a runner; None for models that cannot or need not be stored.

    Dense weights need not be stored: packing them takes little longer than reading them. model: the model from which
    the runner was made.
    """
    if not isinstance(runner, PagedRunner) or not isinstance(runner.model, CpuModel):
        return None
    if not getattr(model, "quantization", ""):
        return None
    vars(runner.model.source).pop("_weight_conversions", None)  # by which transformers would save it
    return StoredModel(runner.model, runner.backend, runner.weight_bytes)


def restored_runner(stored: StoredModel, config: EngineConfig) -> tuple[PreTrainedModel, Runner]:
    """Returns a model that was stored, and its runner."""
    stored.backend.resume(config)
    return stored.backend.source, PagedRunner(stored.model, stored.backend, config.group, stored.weight_bytes)


def _padded(model: PreTrainedModel, backend: Backend, config: EngineConfig) -> PaddedRunner:
    if config.kv_cache_dtype is not None:
        raise UnsupportedModel(
            f"--kv-cache-dtype {config.kv_cache_dtype} is for models whose batches are paged; "
            f"{model.config.model_type} models run in padded batches, so leave it out"
        )
    _warn_no_graphs(config, "on the padded path")
    backend.pack_source()
    try:
        return PaddedRunner(model, backend)
    except UnsupportedModel:
        if not backend.unpack_source():
            raise
    return PaddedRunner(model, backend)


def _spec(model: PreTrainedModel) -> DecoderSpec | None:
    try:
        return spec_of(model.config)
    except NoSpec as reason:
        logger.info("%s runs in the layers of transformers: %s", model.config.model_type, reason)
        return None


def _warn_no_graphs(config: EngineConfig, where: str) -> None:
    if config.cuda_graphs:
        logger.warning("--cuda-graphs has no effect: decoding %s runs without CUDA graphs", where)
