"""Finds out, before any request, how a model can run in padded batches with right results.

Three texts of different lengths join one after another, advance, change places and leave. Their logits have to be
those that the model computes from each whole text alone, without any cache.
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.contract import StoppingParameters
from tgi_server.engine import proofs
from tgi_server.engine.backends.own_pass import probe_tokens
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.parallel import ShardGroup, fault_of_any
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.padded.passes import Passes
from tgi_server.engine.runners.padded.rows import OneByOne, Rows, SideBySide
from tgi_server.engine.sequence import RunningSequence

logger = logging.getLogger(__name__)

# Tokens of each text's prompt, and tokens generated before it joins.
TEXTS = ((8, 0), (5, 2), (6, 1))
# Tokens by which a text advances.
STEPS = 2


def choose_rows(model: PreTrainedModel, passes: Passes, group: ShardGroup | None = None) -> Rows:
    """Returns the fastest way to keep rows with which the model is right. Raises UnsupportedModel when there is none.

    group: the shards of the model, when this is one of them; all of them choose the same.
    """
    together = _objection(model, passes, SideBySide(passes), group)
    if together is None:
        return SideBySide(passes)
    alone = _objection(model, passes, OneByOne(passes), group)
    if alone is None:
        logger.info("%s computes one sequence at a time: side by side, %s", model.config.model_type, together)
        return OneByOne(passes)
    raise UnsupportedModel(f"{model.config.model_type} models are not supported: {alone}")


def _objection(model: PreTrainedModel, passes: Passes, rows: Rows, group: ShardGroup | None) -> str | None:
    """Returns why this way of keeping rows is wrong for the model, or any shard of it; None when it is right."""
    fault = proofs.fault_of(
        "a text that is computed in steps",
        lambda: [("in its logits", *_logits(model, passes, rows))],
        "logits",
        measure=proofs.logits_error,
    )
    return fault_of_any(fault, group)


def _logits(model: PreTrainedModel, passes: Passes, rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns the logits of texts that are computed in steps, and of whole texts: [rows, vocab_size] each."""
    sequences = [_sequence(model, index, *text) for index, text in enumerate(TEXTS)]
    alone = [passes.alone(_sequence(model, 0, prompt, generated + STEPS)) for prompt, generated in TEXTS]
    expected: list[Tensor] = []
    actual: list[Tensor] = []
    order: list[int] = []
    advanced = [generated for _, generated in TEXTS]

    def prefill(*indices: int) -> None:
        actual.extend(rows.prefill([_whole(sequences[index]) for index in indices]))
        rows.commit()
        order.extend(indices)
        expected.extend(alone[index][advanced[index]] for index in indices)

    def decode() -> None:
        texts = [(index, TEXTS[index][0] + advanced[index]) for index in order]
        tokens = torch.stack([probe_tokens(model, length + 1)[-1] for _, length in texts])
        actual.extend(rows.decode(tokens).split(1))
        for index in order:
            advanced[index] += 1
            expected.append(alone[index][advanced[index]])

    prefill(0, 1)
    decode()
    prefill(2)
    rows.select([2, 1])
    order[:] = [2, 1]
    decode()
    return torch.cat(actual), torch.stack(expected)


def _sequence(model: PreTrainedModel, request_id: int, prompt: int, generated: int) -> RunningSequence:
    tokens = probe_tokens(model, prompt + generated).tolist()
    return RunningSequence(request_id, tokens[:prompt], StoppingParameters(STEPS), generated_ids=tokens[prompt:])


def _whole(sequence: RunningSequence) -> PromptChunk:
    return PromptChunk.next_of(sequence, sequence.remaining)
