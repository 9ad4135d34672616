"""Loads drafters: models, EAGLE and Medusa heads from their own folders, and MTP layers from the model's."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.backends.decoder import Unfit
from tgi_server.engine.backends.devices import choose_dtype
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.model_folder import read_object
from tgi_server.engine.checkpoint.quantized import find_quantization
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.runners import create_runner
from tgi_server.engine.runners.base import UNBOUNDED_POSITIONS
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.speculation.draft_model import DraftModel
from tgi_server.engine.speculation.drafters import ModelDrafter
from tgi_server.engine.speculation.eagle import Eagle
from tgi_server.engine.speculation.eagle_model import read_eagle
from tgi_server.engine.speculation.layer_model import LayerModel
from tgi_server.engine.speculation.medusa import Medusa, read_heads
from tgi_server.engine.speculation.mtp_model import read_mtp
from tgi_server.grammar.tokenizer import has_tokenizer, read_definition

logger = logging.getLogger(__name__)


def load_drafter(config: EngineConfig, model: PreTrainedModel, runner: PagedRunner) -> ModelDrafter:
    """Returns the drafter in the folder `config.speculative_model`, for a model and its runner.

    Raises an EngineError for a folder that cannot draft for the model.
    """
    folder = config.speculative_model
    assert folder is not None
    settings = read_object(folder / "config.json")
    if "medusa_num_heads" in settings:
        return _medusa(folder, settings, config, model, runner)
    if any("eagle3" in str(name).lower() for name in settings.get("architectures") or ()):
        return _eagle(folder, settings, model, runner)
    return _draft_model(folder, config, model, runner)


def load_own_drafter(
    config: EngineConfig, model_config: PretrainedConfig, model: PreTrainedModel, runner: PagedRunner
) -> ModelDrafter | None:
    """Returns the drafter in the model's own checkpoint, for its runner; None if there is none.

    model_config: the folder's own.
    """
    if isinstance(runner.model, CpuModel | ReferenceModel):
        variants = [layer.variant for layer in runner.model.decoder.layers if layer.variant is not None]
    elif isinstance(runner.model, GenericModel):
        variants = list(runner.model.variants.values())
    else:
        return None
    quantization = find_quantization(config.model_path, model_config, config.quantize)
    try:
        network = read_mtp(config.model_path, model, runner.backend, variants, quantization, config.group)
    except Unfit as reason:
        logger.warning("the layer for multi-token prediction in %s is not used: %s", config.model_path, reason)
        return None
    if network is None:
        return None
    drafter = _over_hidden_states(network, runner, [model.config.get_text_config(decoder=True).num_hidden_layers])
    logger.info("drafts come from the layer for multi-token prediction in %s", config.model_path)
    return drafter


def _over_hidden_states(
    network: LayerModel, runner: PagedRunner, layers: Sequence[int], token_ids: Tensor | None = None
) -> Eagle:
    """Returns the drafter of a network that reads the inputs of a model's layers. runner: the model's."""
    own = PagedRunner(network, runner.backend)
    runner.share_block_size(own)
    runner.companion_bytes = own.bytes_per_token
    runner.hidden_states = HiddenStates(layers)
    return Eagle(own, network, runner.hidden_states, token_ids)


def _hidden_layers(folder: Path, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the indices of the decoder layers whose inputs EAGLE-3 reads. settings: its config.json.

    Raises UnsupportedModel unless these are three indices of the model's `layers` layers.
    """
    after = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    before = settings.get("eagle_aux_hidden_state_layer_ids") or [layer + 1 for layer in after]
    chosen = sorted({*(before or (2, layers // 2, layers - 3))})
    if len(chosen) != 3 or not 0 <= chosen[0] <= chosen[-1] < layers:
        raise UnsupportedModel(
            f"{folder}: EAGLE-3 reads the inputs of three layers, and {chosen} are not three of "
            f"{layers}; set eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return tuple(chosen)


def _eagle(folder: Path, settings: dict[str, Any], model: PreTrainedModel, runner: PagedRunner) -> Eagle:
    """Loads the layer into each shard: it is small."""
    layers = model.config.get_text_config(decoder=True)
    eagle, token_ids = read_eagle(folder, settings, model, runner.backend)
    hidden_layers = _hidden_layers(folder, settings, layers.num_hidden_layers)
    return _over_hidden_states(eagle, runner, hidden_layers, token_ids)


def _medusa(
    folder: Path, settings: dict[str, Any], config: EngineConfig, model: PreTrainedModel, runner: PagedRunner
) -> Medusa:
    heads = read_heads(folder, settings, model)
    if config.speculate > len(heads):
        raise UnsupportedModel(f"--speculate is {config.speculate}, but {folder} has {len(heads)} Medusa heads")
    runner.backend.pack(heads)
    runner.hidden_states = HiddenStates()
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    return Medusa(heads, runner.hidden_states, torch.zeros(64, hidden_size, device=model.device, dtype=model.dtype))


def _draft_model(folder: Path, config: EngineConfig, model: PreTrainedModel, runner: PagedRunner) -> DraftModel:
    """Loads a model that computes alone in each shard, since it is small, in weights as its checkpoint has them."""
    own = replace(config, model_path=folder, group=None, quantize=None, speculate=0, speculative_model=None)
    check_same_tokenizer(config.model_path, folder)
    draft = load_model(own, model.device, choose_dtype(own, model.device))
    draft_runner = create_runner(draft, own, alone=False)
    if not isinstance(draft_runner, PagedRunner):
        raise UnsupportedModel(
            f"{folder}: {draft.config.model_type} models run in padded batches and cannot draft; name another model"
        )
    if draft_runner.states is not None:
        raise UnsupportedModel(
            f"{folder}: {draft.config.model_type} models have recurrent states and cannot draft; name another model"
        )
    runner.share_block_size(draft_runner)
    runner.companion_bytes = draft_runner.bytes_per_token
    sizes = [loaded.config.get_text_config(decoder=True).vocab_size for loaded in (model, draft)]
    return DraftModel(draft_runner, min(sizes), position_limit(draft.config) or UNBOUNDED_POSITIONS)


def check_same_tokenizer(model: Path, draft: Path) -> None:
    """Raises UnsupportedModel when a token of one model's tokenizer is another in that of the draft model."""
    if not has_tokenizer(model):
        return  # clients send tokens, and there is nothing to compare
    if not has_tokenizer(draft):
        raise UnsupportedModel(f"{draft} has no tokenizer; add that of {model}, if the two models have the same")
    first, second = (_tokens(folder) for folder in (model, draft))
    for token in sorted(first.keys() & second.keys()):
        if first[token] != second[token]:
            raise UnsupportedModel(
                f"{draft} has another tokenizer than {model}: token {token} is {second[token]!r} there and "
                f"{first[token]!r} here; name a draft model with the same tokenizer"
            )


def _tokens(folder: Path) -> dict[int, str]:
    try:
        tokenizer = Tokenizer.from_str(read_definition(folder))
    except Exception as error:  # tokenizers raises no other kind
        raise UnsupportedModel(f"the tokenizer in {folder} cannot be read: {error}") from error
    return {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}
