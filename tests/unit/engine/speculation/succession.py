"""A tiny Llama in which each token says which one is next, so that what drafts for it can be made to be right."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tiny_models import VOCAB_SIZE, build
from tgi_server.engine.speculation.drafters import Drafter

FIXED = VOCAB_SIZE - 1
"""The token that follows itself."""


def succession_llama(folder: Path) -> LlamaForCausalLM:
    """Saves the model in a folder, and returns it. Token n is followed by n + 7, around those below FIXED.

    Its layers add nothing, so that the head gets the embedding of the last token.
    """
    model = build("llama", num_hidden_layers=4)
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(head_for(model, 1))
    model.save_pretrained(folder)
    return model


def head_for(model: LlamaForCausalLM, distance: int) -> Tensor:
    """Returns the weight of a head, [vocab_size, hidden_size], that finds the token `distance` after the last."""
    embeddings = torch.nn.functional.normalize(model.model.embed_tokens.weight.detach(), dim=1)
    weight = torch.empty_like(embeddings)
    for token in range(VOCAB_SIZE):
        weight[follower(token, distance)] = embeddings[token]
    return weight


def follower(token: int, distance: int = 1) -> int:
    return token if token == FIXED else (token + 7 * distance) % FIXED


def watch_drafts(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Returns a list that gets each draft as it is proposed: the tokens of its sequence, and those that are drafted."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def watched(room):
        drafts = propose(room)
        seen.extend((sequence.tokens(0, sequence.length), draft) for sequence, draft in drafts.items() if draft)
        return drafts

    monkeypatch.setattr(drafter, "propose", watched)
    return seen
