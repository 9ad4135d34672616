"""The contract's types as messages of `generate.proto`, and back."""

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import BlockCopy, FinishReason, Grammar, GrammarKind, SamplingParameters

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
}
_FINISH_REASONS_BACK = {message: reason for reason, message in _FINISH_REASONS.items()}


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


def finish_reason_to_message(reason: FinishReason | None) -> pb.FinishReason:
    """reason: None for a request that goes on."""
    return _FINISH_REASONS[reason]


def finish_reason_from_message(message: pb.FinishReason) -> FinishReason | None:
    """Returns None for a request that goes on."""
    return _FINISH_REASONS_BACK[message]


def sampling_to_message(sampling: SamplingParameters) -> pb.SamplingParameters:
    return pb.SamplingParameters(
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        count_penalty=sampling.count_penalty,
        seed=sampling.seed,
        watermark=sampling.watermark,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        late_tokens=sampling.late_tokens,
    )


def sampling_from_message(message: pb.SamplingParameters) -> SamplingParameters:
    """Returns greedy decoding for a message in which nothing is set."""
    if not (message.do_sample or message.ByteSize()):
        return SamplingParameters()
    return SamplingParameters(
        do_sample=message.do_sample,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        typical_p=message.typical_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        count_penalty=message.count_penalty,
        seed=message.seed,
        watermark=message.watermark,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        late_tokens=tuple(message.late_tokens),
    )


def block_copy_to_message(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(source=copy.source, target=copy.target, tokens=copy.tokens)


def block_copy_from_message(message: pb.BlockCopy) -> BlockCopy:
    return BlockCopy(message.source, message.target, message.tokens)
