"""Loads the parts of an engine: the model and its runner, a vision tower, and drafters."""

import logging
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel

from tgi_server.engine.backends.devices import choose_dtype
from tgi_server.engine.checkpoint.load_model import check_shards, load_model, load_vision
from tgi_server.engine.checkpoint.model_folder import ModelFolder
from tgi_server.engine.checkpoint.packed_cache import packed_file, read_packed, write_packed
from tgi_server.engine.checkpoint.weight_files import weight_bytes
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.end_tokens import end_token_ids
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.models.families import family_of, position_limit
from tgi_server.engine.runners import StoredModel, create_runner, restored_runner, stored_model
from tgi_server.engine.runners.base import Runner
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.speculation import (
    HistoryDrafter,
    NgramDrafter,
    Speculation,
    load_drafter,
    load_own_drafter,
)
from tgi_server.engine.vision.tower import VisionTower
from tgi_server.grammar.tokenizer import has_tokenizer

logger = logging.getLogger(__name__)

# From this size on, packed weights are written to disk in the background, while requests are served.
_LARGE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The facts about a model that has been loaded.

    max_position_embeddings: None if only memory limits a sequence. grammars: True if sequences can have a grammar.
    states: True if sequences have recurrent states. speculate: maximum number of tokens drafted for a sequence in a
    step. forward_pass: description of the code that computes a step. quantization: format of the weights; empty: none.
    linear_kernels: names of the kernels of linear layers. weight_bytes: size of the model's files. kv_cache_dtype:
    dtype of keys and values. images: True if prompts can have images. no_images: reason for which a model with vision
    reads no images; empty otherwise. whole_images: True if no chunk of a prompt may end inside an image.
    """

    model_type: str
    dtype: str
    device_type: str
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    decoder_start_token_id: int | None
    encoder_decoder: bool
    paged: bool
    states: bool
    block_size: int
    grammars: bool
    speculate: int
    forward_pass: str
    quantization: str
    linear_kernels: str
    kv_cache_dtype: str
    images: bool = False
    no_images: str = ""
    whole_images: bool = False
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. model: the model of `transformers`; the runner may use its layers. config: config.json.

    tower: the vision tower; None if no images are read. speculation: plans drafts; None without speculation.
    """

    config: PretrainedConfig
    model: PreTrainedModel
    runner: Runner
    tower: VisionTower | None
    speculation: Speculation | None
    info: LoadedModel


def load_parts(config: EngineConfig, model: PreTrainedModel | None = None) -> EngineParts:
    """Loads the parts of an engine. Raises an EngineError that says what is wrong with the folder.

    model: a model that is on the device already; None: the folder's. With a given model nothing else is loaded from
    the folder, so it reads no images.
    """
    if model is None:
        folder = ModelFolder.read(config.model_path, trust_remote_code=config.trust_remote_code)
        model, runner = _load_runner(config, folder)
        tower, no_images = _load_tower(config, folder.model, model, runner)
    else:
        folder = ModelFolder.around(model, config.model_path)
        runner, tower, no_images = create_runner(model, config), None, ""
    speculation = None
    if config.speculate or config.speculative_model is not None:
        speculation = _load_drafters(config, folder.model, model, runner)
    info = _facts(folder, model, runner, tower, no_images, speculation)
    return EngineParts(folder.model, model, runner, tower, speculation, info)


def _load_runner(config: EngineConfig, folder: ModelFolder) -> tuple[PreTrainedModel, Runner]:
    """Returns the model of a folder and its runner, from what an earlier start has stored if it can."""
    file = packed_file(config)
    if (stored := read_packed(file, config.group, StoredModel)) is not None:
        model, runner = restored_runner(stored, config)
        if config.group is not None:
            check_shards(config, model.config, model.dtype)
        return model, runner
    model = load_model(config, config.device, choose_dtype(config, config.device), folder)
    runner = create_runner(model, config)
    if file is not None and (content := stored_model(runner, model)) is not None:
        write_packed(file, content, beside=content.weight_bytes >= _LARGE_BYTES)
    return model, runner


def _load_tower(
    config: EngineConfig, own: PretrainedConfig, model: PreTrainedModel, runner: Runner
) -> tuple[VisionTower | None, str]:
    """Returns the vision tower, or the reason why there is none; neither for a model of text alone."""
    if not config.image_memory:
        return None, "the server was started without memory for images"
    try:
        vision = load_vision(config.model_path, own, config.device, model.dtype)
    except (UnsupportedModel, InvalidWeights) as reason:
        logger.warning("prompts cannot have images: %s", reason)
        return None, str(reason)
    if vision is None:
        return None, ""
    if not isinstance(runner, PagedRunner):
        return None, f"{model.config.model_type} models run in padded batches, which have no images"
    runner.backend.pack(vision)
    runner.tower = VisionTower(vision, family_of(own), config.image_memory)
    return runner.tower, ""


def _load_drafters(config: EngineConfig, own: PretrainedConfig, model: PreTrainedModel, runner: Runner) -> Speculation:
    if not isinstance(runner, PagedRunner):
        raise UnsupportedModel(
            f"{model.config.model_type} models run in padded batches, where no tokens can be drafted; leave out "
            f"{'--speculative-model' if config.speculative_model else '--speculate'}"
        )
    most, drafters = config.speculate, [HistoryDrafter(), NgramDrafter()]
    if config.speculative_model is not None:
        drafter = load_drafter(config, model, runner)
        most, drafters = most or drafter.default_most, [HistoryDrafter(), drafter]
    elif (drafter_of_model := load_own_drafter(config, own, model, runner)) is not None:
        drafters = [HistoryDrafter(), drafter_of_model]
    runner.most_drafted = most
    return Speculation(most, drafters, config.group, config.device)


def _facts(
    folder: ModelFolder,
    model: PreTrainedModel,
    runner: Runner,
    tower: VisionTower | None,
    no_images: str,
    speculation: Speculation | None,
) -> LoadedModel:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(
        model_type=model.config.model_type,
        dtype=dtype,
        device_type=runner.backend.device_type,
        vocab_size=vocab_size,
        max_position_embeddings=position_limit(model.config),
        eos_token_ids=end_token_ids(folder, model.generation_config.eos_token_id, vocab_size),
        bos_token_id=model.generation_config.bos_token_id,
        decoder_start_token_id=model.generation_config.decoder_start_token_id,
        encoder_decoder=model.config.is_encoder_decoder,
        paged=runner.paged,
        states=runner.states is not None,
        block_size=runner.block_size,
        grammars=has_tokenizer(folder.path),
        speculate=speculation.most if speculation else 0,
        forward_pass=_forward_pass(runner),
        quantization=getattr(model, "quantization", ""),
        linear_kernels=runner.backend.linear_kernels,
        kv_cache_dtype=str(runner.model.attention.kv_format) if isinstance(runner, PagedRunner) else dtype,
        images=tower is not None,
        no_images=no_images,
        whole_images=tower is not None and bool(tower.two_way),
        weight_bytes=weight_bytes(folder.path),
    )


def _forward_pass(runner: Runner) -> str:
    """Returns how a step is computed, in words."""
    if not isinstance(runner, PagedRunner):
        return "transformers, in padded batches"
    attention = runner.model.attention.name
    return f"{runner.model.name}, attention by {attention}" if attention else runner.model.name
