"""The contract's types as messages of `generate.proto`, and back."""

from dataclasses import fields
from typing import Any

from shared.stubs import generate_pb2 as pb
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
    ThoughtBudget,
)
from tgi_server.shared_bytes import MemoryPlace, SharedBytes

_GRAMMAR_TYPES = {
    GrammarKind.REGEX: pb.Grammar.REGEX,
    GrammarKind.JSON_SCHEMA: pb.Grammar.JSON_SCHEMA,
    GrammarKind.LARK: pb.Grammar.LARK,
}
_GRAMMAR_TYPES_BACK = {message: kind for kind, message in _GRAMMAR_TYPES.items()}
_FINISH_REASONS = {
    None: pb.FINISH_REASON_NONE,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}
_FINISH_REASONS_BACK = {message: reason for reason, message in _FINISH_REASONS.items()}
# Messages and the contract have the same names for these.
_NAMES: dict[type, tuple[str, ...]] = {
    parameters: tuple(field.name for field in fields(parameters))
    for parameters in (SamplingParameters, StoppingParameters, ReportParameters)
}


def grammar_to_message(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(
        type=_GRAMMAR_TYPES[grammar.type],
        value=grammar.value,
        text=grammar.text,
        frame=grammar.frame,
        lenient=grammar.lenient,
    )


def grammar_from_message(message: pb.Grammar) -> Grammar:
    return Grammar(
        _GRAMMAR_TYPES_BACK[message.type], message.value, message.text, message.frame, tuple(message.lenient)
    )


def thought_budget_to_message(budget: ThoughtBudget) -> pb.ThoughtBudget:
    return pb.ThoughtBudget(
        tokens=budget.tokens,
        begin=budget.begin,
        end=budget.end,
        closing=budget.closing,
        open=budget.open,
        repeats=budget.repeats,
    )


def thought_budget_from_message(message: pb.ThoughtBudget) -> ThoughtBudget:
    return ThoughtBudget(
        message.tokens, message.begin, message.end, tuple(message.closing), message.open, message.repeats
    )


def finish_reason_to_message(reason: FinishReason | None) -> pb.FinishReason:
    """reason: None for a request that continues."""
    return _FINISH_REASONS[reason]


def finish_reason_from_message(message: pb.FinishReason) -> FinishReason | None:
    """Returns None for a request that continues."""
    return _FINISH_REASONS_BACK[message]


def sampling_to_message(sampling: SamplingParameters) -> pb.SamplingParameters:
    return pb.SamplingParameters(**members(sampling))


def sampling_from_message(message: pb.SamplingParameters) -> SamplingParameters:
    """Returns greedy decoding for a message in which nothing is set."""
    if not (message.do_sample or message.ByteSize()):
        return SamplingParameters()
    values = {name: getattr(message, name) for name in _NAMES[SamplingParameters]}
    return SamplingParameters(
        **values | {"logit_bias": dict(message.logit_bias), "late_tokens": tuple(message.late_tokens)}
    )


def stopping_from_message(message: pb.Request) -> StoppingParameters:
    return StoppingParameters(**{name: getattr(message, name) for name in _NAMES[StoppingParameters]})


def report_from_message(message: pb.Request) -> ReportParameters:
    values = {name: getattr(message, name) for name in _NAMES[ReportParameters]}
    return ReportParameters(**values | {"scored_token_ids": tuple(message.scored_token_ids)})


def members(parameters: SamplingParameters | StoppingParameters | ReportParameters) -> dict[str, Any]:
    """Returns the fields of the parameters, which the messages have by the same names, but for zeros and empty ones."""
    return {name: value for name in _NAMES[type(parameters)] if (value := getattr(parameters, name))}


def block_copy_to_message(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(source=copy.source, target=copy.target, tokens=copy.tokens)


def block_copy_from_message(message: pb.BlockCopy) -> BlockCopy:
    return BlockCopy(message.source, message.target, message.tokens)


def image_to_message(image: Image) -> pb.Image:
    """Returns the message of an image. Tensors in shared memory are named by their place, others are copied."""
    tensors = []
    for each in image.tensors:
        tensor = pb.Tensor(name=each.name, dtype=each.dtype, shape=each.shape)
        if isinstance(each.data, SharedBytes):
            tensor.shared.CopyFrom(shared_to_message(each.data))
        else:
            assert isinstance(each.data, bytes)
            tensor.data = each.data
        tensors.append(tensor)
    return pb.Image(digest=image.digest, start=image.start, length=image.length, tensors=tensors)


def image_from_message(message: pb.Image) -> Image:
    tensors = tuple(
        Tensor(
            each.name,
            each.dtype,
            tuple(each.shape),
            shared_from_message(each.shared) if each.HasField("shared") else each.data,
        )
        for each in message.tensors
    )
    return Image(message.digest, message.start, message.length, tensors)


def shared_to_message(data: SharedBytes) -> pb.SharedBytes:
    place = data.place
    return pb.SharedBytes(
        process=place.process, descriptor=place.descriptor, inode=place.inode, start=data.start, size=data.size
    )


def shared_from_message(message: pb.SharedBytes) -> SharedBytes:
    place = MemoryPlace(message.process, message.descriptor, message.inode)
    return SharedBytes(place, message.start, message.size)


def shares_memory(probe: pb.SharedBytes) -> bool:
    """Returns True if this process can read the memory of the one that has sent the message."""
    try:
        return bool(probe.size) and len(shared_from_message(probe).map()) == probe.size
    except (OSError, ValueError):
        return False
