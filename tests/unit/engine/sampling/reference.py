"""The processors and warpers of transformers, applied to one row's logits."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tgi_server.contract import SamplingParameters


def processed(logits: Tensor, p: SamplingParameters, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """The float32 scores `[vocab]` that the next token of one request is chosen by, without watermark."""
    scores = logits.float().unsqueeze(0)
    text = torch.tensor([[*prompt, *generated]])
    if p.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(text, scores)
    if p.frequency_penalty:
        scores = scores - torch.bincount(text[0], minlength=scores.shape[1]) / text.shape[1] * p.frequency_penalty
    if p.count_penalty:
        scores = scores - torch.bincount(text[0, len(prompt) :], minlength=scores.shape[1]) * p.count_penalty
    if p.presence_penalty:
        scores = scores.clone()
        scores[0, list(set(generated))] -= p.presence_penalty
    if p.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[i], value] for i, value in p.logit_bias.items()])(text, scores)
    if p.do_sample:
        for warper in _warpers(p):
            scores = warper(text, scores)
    return scores[0]


def _warpers(p: SamplingParameters) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if p.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(p.typical_p))
    if p.min_p > 0.0:
        warpers.append(MinPLogitsWarper(p.min_p))
    return warpers
