"""Finds out, before any request, whether a model can take the paged path, and what its keys look like.

The model runs a short prompt twice: with its own attention, and with every key, value and query caught on the way.
A model that silently ignores a registered attention function shows no calls; one that does more in its attention than
the paged path knows shows other logits. Both are noticed here, and never answer a request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import AttentionVariant, Chunk, KVShape, Step
from tgi_server.engine.attention.gather import GatherAttention
from tgi_server.engine.errors import EngineError, UnsupportedModel
from tgi_server.engine.models.paged_cache import IMPLEMENTATION, PagedCache

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class _Recorder(GatherAttention):
    """Attends over the pass's own keys, and remembers their shapes and how each layer attends."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(KVShape(heads=(), head_dim=0), model.device, model.dtype)
        self.heads: dict[int, int] = {}
        self.head_dims: set[int] = set()
        self.variants: dict[int, AttentionVariant] = {}
        self.attended = 0

    def write(self, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
        self.heads[layer] = key.shape[1]
        self.head_dims |= {key.shape[2], value.shape[2]}
        self._keys = dict.fromkeys([layer], key.unsqueeze(0))  # type: ignore[assignment]
        self._values = dict.fromkeys([layer], value.unsqueeze(0))  # type: ignore[assignment]

    def attend(self, layer: int, query: Tensor, step: Step, variant: AttentionVariant) -> Tensor:
        self.attended += 1
        self.variants[layer] = variant
        return super().attend(layer, query, step, variant)


def probe_kv_shape(model: PreTrainedModel) -> KVShape | None:
    """The shape of the model's keys and values, or None when it has to take the padded path.

    Leaves the model with the paged attention function set when it returns a shape, else with its own.
    """
    if model.config.is_encoder_decoder:
        return None
    tokens = torch.arange(PROBE_TOKENS, device=model.device) % model.config.vocab_size
    own = model.config._attn_implementation
    expected = model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
    recorder = _Recorder(model)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        actual = _run(model, recorder, tokens)
    except (EngineError, TypeError, ValueError, AttributeError, RuntimeError, KeyError, IndexError) as error:
        reason: str | None = f"its attention cannot be replaced ({type(error).__name__}: {error})"
    else:
        reason = _objection(recorder, expected, actual, TOLERANCE[model.dtype])
    if reason is None:
        heads = tuple(recorder.heads[layer] for layer in sorted(recorder.heads))
        return KVShape(heads=heads, head_dim=recorder.head_dims.pop())
    logger.info("%s takes the padded path: %s", model.config.model_type, reason)
    model.set_attn_implementation(own)
    return None


@contextmanager
def same_logits(model: PreTrainedModel) -> Iterator[dict[int, AttentionVariant]]:
    """Checks that what is done to a model on the paged path leaves its logits as they were.

    Yields how each layer attends. Raises UnsupportedModel when they differ by more than rounding.
    """
    tokens = torch.arange(PROBE_TOKENS, device=model.device) % model.config.vocab_size
    recorder = _Recorder(model)
    before = _run(model, recorder, tokens)
    yield recorder.variants
    error = _difference(before, _run(model, _Recorder(model), tokens))
    if not error <= TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"this {model.config.model_type} model's logits change by {error:.2g} with the CPU kernels; "
            "start with --disable-custom-kernels"
        )


def _run(model: PreTrainedModel, recorder: _Recorder, tokens: Tensor) -> Tensor:
    cache = PagedCache(recorder)
    cache.attach(model)
    count, device = len(tokens), tokens.device
    cache.step = Step(
        slots=torch.arange(count, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        kv_lengths=torch.tensor([count], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        decoding=0,
        chunks=[Chunk(start=0, length=count, kv_length=count)],
        max_kv_length=count,
    )
    positions = torch.arange(count, device=device)
    output = model(input_ids=tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float()


def _objection(recorder: _Recorder, expected: Tensor, actual: Tensor, tolerance: float) -> str | None:
    layers = len(recorder.heads)
    if not layers or recorder.attended != layers:
        return f"it called the attention function {recorder.attended} times in {layers} layers with keys"
    if sorted(recorder.heads) != list(range(layers)) or len(recorder.head_dims) != 1:
        return "its layers have keys of different kinds"
    error = _difference(expected, actual)
    if not error <= tolerance:
        return f"its logits differ by {error:.2g} from those with its own attention"
    return None


def _difference(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).norm() / expected.norm())
