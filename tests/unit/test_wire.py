from dataclasses import fields
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tgi_server import wire
from tgi_server.contract import (
    BlockCopy,
    FinishReason,
    Grammar,
    GrammarKind,
    Image,
    ReportParameters,
    SamplingParameters,
    StoppingParameters,
    Tensor,
)


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_survives_the_wire(kind: GrammarKind) -> None:
    grammar = Grammar(kind, "value", "text")
    assert wire.grammar_from_message(wire.grammar_to_message(grammar)) == grammar


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_finish_reason_survives_the_wire(reason: FinishReason | None) -> None:
    assert wire.finish_reason_from_message(wire.finish_reason_to_message(reason)) is reason


def test_sampling_parameters_survive_the_wire() -> None:
    sampling = SamplingParameters(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
        count_penalty=-1.25,
        seed=2**64 - 1,
        watermark=True,
        logit_bias={3: -1.5, 0: 4.0},
    )
    assert wire.sampling_from_message(wire.sampling_to_message(sampling)) == sampling


@pytest.mark.parametrize(
    ("parameters", "message"),
    [(SamplingParameters, pb.SamplingParameters), (StoppingParameters, pb.Request), (ReportParameters, pb.Request)],
)
def test_messages_have_every_parameter_by_its_name(parameters: type, message: Any) -> None:
    names, known = {field.name for field in fields(parameters)}, {field.name for field in message.DESCRIPTOR.fields}
    assert names <= known
    assert parameters is not SamplingParameters or names == known


def test_an_empty_message_of_sampling_parameters_is_greedy_decoding() -> None:
    assert wire.sampling_from_message(wire.sampling_to_message(SamplingParameters())) == SamplingParameters()
    assert wire.sampling_from_message(type(wire.sampling_to_message(SamplingParameters()))()) == SamplingParameters()


def test_a_block_copy_survives_the_wire() -> None:
    copy = BlockCopy(source=5, target=9, tokens=13)
    assert wire.block_copy_from_message(wire.block_copy_to_message(copy)) == copy


def test_an_image_survives_the_wire() -> None:
    tensors = Tensor("pixel_values", "float32", (1, 2), b"\0\0\0\0\0\0\x80?"), Tensor("sizes", "int64", (), b"\7" * 8)
    image = Image(digest=b"\x12" * 32, start=5, length=9, tensors=tensors)
    assert wire.image_from_message(wire.image_to_message(image)) == image
