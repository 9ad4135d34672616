"""Rotary embeddings: a request's length does not change other requests' tokens, and tables have the computed values."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from tests.tiny_models import build, make
from tests.unit.engine.requests import (
    Requests,
    expected_tokens,
    generate_alone,
    generate_together,
    load_engine,
    prompts,
)
from tgi_server.engine.backends.rope import LengthDependentRope, RotaryTable
from tgi_server.engine.models.spec import RopeSpec

# Tokens up to which the models here have their first frequencies.
ORIGINAL = 32
SHORT = (1, 20, 5, 17, 9, 2, 13, 20)
MIXED = (1, 70, 5, 33, 64, 2, 17, 48)


@pytest.mark.parametrize("architecture", ["llama_dynamic", "phi3_longrope"])
def test_within_the_original_length_tokens_are_those_of_transformers(architecture, tmp_path) -> None:
    folder = make(architecture, tmp_path)
    assert generate_together(load_engine(folder), prompts(SHORT), max_total_tokens=ORIGINAL) == expected_tokens(
        folder, prompts(SHORT)
    )


@pytest.mark.parametrize("architecture", ["llama_dynamic", "phi3_longrope"])
def test_beyond_it_they_are_the_same_alone_and_in_company(architecture, tmp_path) -> None:
    engine = load_engine(make(architecture, tmp_path))
    assert generate_together(engine, prompts(MIXED)) == generate_alone(engine, prompts(MIXED))


def test_prompts_beyond_the_original_length_get_the_long_factors_as_in_transformers(tmp_path) -> None:
    folder = make("phi3_longrope", tmp_path)
    together = generate_together(load_engine(folder), prompts(MIXED))
    expected = expected_tokens(folder, prompts(MIXED))
    long = [index for index, length in enumerate(MIXED) if length > ORIGINAL]
    assert [together[index] for index in long] == [expected[index] for index in long]
    assert together != expected  # the short ones have the long factors too: one rule for all


def test_a_resumed_request_goes_on_as_if_it_had_never_left(tmp_path) -> None:
    engine = load_engine(make("llama_dynamic", tmp_path))
    texts = prompts((30, 25))
    requests = Requests(engine, texts)
    requests.join(0)
    requests.join(1)
    for _ in range(5):
        requests.step()
    requests.leave(0)
    requests.step()
    requests.join(0)
    assert requests.finish() == generate_alone(engine, texts)


def test_frequencies_follow_the_last_length_they_were_fixed_for() -> None:
    model = build("llama_dynamic")
    module = model.model.rotary_emb
    original = module.inv_freq.clone()
    rope = LengthDependentRope(model)
    rope.fix(96)
    stretched = module.inv_freq.clone()
    assert not torch.equal(stretched, original)
    rope.fix(64)
    between = module.inv_freq.clone()
    assert (between[1:] > stretched[1:]).all()
    rope.fix(ORIGINAL)
    assert torch.equal(module.inv_freq, original)
    module(torch.zeros(1), torch.tensor([[200]]))
    assert torch.equal(module.inv_freq, original)


def test_each_type_of_layer_has_frequencies_of_its_own() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    parameters = {"full_attention": dynamic, "sliding_attention": plain}
    model = build("gemma3_text", rope_parameters=parameters, max_position_embeddings=ORIGINAL)
    module = next(module for module in model.modules() if isinstance(module, Gemma3RotaryEmbedding))
    before = {kind: getattr(module, f"{kind}_inv_freq").clone() for kind in parameters}
    LengthDependentRope(model).fix(96)
    assert not torch.equal(module.full_attention_inv_freq, before["full_attention"])
    assert torch.equal(module.sliding_attention_inv_freq, before["sliding_attention"])


@pytest.mark.parametrize("architecture", ["llama", "llama_dynamic", "phi3_longrope"])
def test_a_table_has_what_the_embedding_computes(architecture) -> None:
    model = build(architecture)
    table, rope = RotaryTable(model.model.rotary_emb, RopeSpec()), LengthDependentRope(model)
    hidden = torch.zeros(1, dtype=torch.bfloat16)
    for length in (40, 5000, 96, 20):  # a table that is made, longer, and made anew where it depends on the length
        rope.fix(length)
        positions = torch.tensor([[length - 1, 3, 0, length // 2]])
        found_tables = [each[positions] for each in table.tables(hidden, length)]
        for found, expected in zip(found_tables, model.model.rotary_emb(hidden, positions), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
