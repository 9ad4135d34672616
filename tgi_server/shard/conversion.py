"""Between the messages of `generate.proto` and the engine's own types."""

from collections.abc import Iterable

from shared.stubs import generate_pb2 as pb
from tgi_server.engine import parameters
from tgi_server.engine.engine import ModelInfo
from tgi_server.engine.models.runner import Capacity
from tgi_server.engine.results import FinishReason, Generation, StepResult
from tgi_server.engine.sequence import BlockCopy, Sequence

_GRAMMAR_TYPES = {
    pb.Grammar.REGEX: parameters.GrammarType.REGEX,
    pb.Grammar.JSON_SCHEMA: parameters.GrammarType.JSON_SCHEMA,
    pb.Grammar.LARK: parameters.GrammarType.LARK,
}
_FINISH_REASONS = {
    None: pb.FINISH_REASON_NONE,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
}


def info(model: ModelInfo, model_id: str, revision: str | None, world_size: int) -> pb.InfoResponse:
    return pb.InfoResponse(
        model_id=model_id,
        revision=revision or "",
        model_type=model.model_type,
        dtype=model.dtype,
        device_type=model.device_type,
        world_size=world_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings or 0,
        eos_token_ids=model.eos_token_ids,
        paged=model.paged,
        encoder_decoder=model.encoder_decoder,
        block_size=model.block_size,
        bos_token_id=model.bos_token_id or 0,
        decoder_start_token_id=model.decoder_start_token_id or 0,
        grammars=model.grammars,
    )


def capacity(capacity: Capacity) -> pb.WarmupResponse:
    return pb.WarmupResponse(
        num_blocks=capacity.num_blocks,
        max_total_tokens=capacity.max_total_tokens,
        max_batch_total_tokens=capacity.max_batch_total_tokens,
    )


def sequence(request: pb.Request) -> Sequence:
    """Raises InvalidCall for a request without tokens to compute."""
    return Sequence(
        request_id=request.id,
        input_ids=list(request.input_ids),
        generated_ids=list(request.generated_ids),
        sampling=_sampling(request.sampling),
        stopping=parameters.StoppingParameters(request.max_new_tokens, request.ignore_eos),
        report=parameters.ReportParameters(request.logprobs, request.top_n_tokens, request.prefill_logprobs),
        grammar=grammar(request.grammar) if request.HasField("grammar") else None,
        blocks=list(request.block_ids),
        lookahead=request.lookahead,
        computed=request.cached_tokens,
        copy=_copy(request.copy) if request.HasField("copy") else None,
    )


def grants(messages: Iterable[pb.Grant]) -> list[tuple[int, list[int]]]:
    return [(grant.request_id, list(grant.block_ids)) for grant in messages]


def step_response(result: StepResult) -> pb.StepResponse:
    return pb.StepResponse(
        generations=[_generation(generation) for generation in result.generations],
        timings=pb.Timings(
            forward_ns=result.forward_ns,
            sampling_ns=result.total_ns - result.forward_ns,
            total_ns=result.total_ns,
        ),
    )


def _generation(generation: Generation) -> pb.Generation:
    message = pb.Generation(
        request_id=generation.request_id,
        token_ids=(generation.token_id, *generation.forced),
        hidden=generation.hidden,
        error=generation.error or "",
        finish_reason=_FINISH_REASONS[generation.finish_reason],
    )
    if generation.logprob is not None:
        # Of a token that there is no choice about, the probability is 1.
        message.logprobs.extend((generation.logprob, *(0.0 for _ in generation.forced)))
    if top := generation.top_tokens:
        message.top_tokens.add(ids=top.ids, logprobs=top.logprobs)
        for token in generation.forced:
            message.top_tokens.add(ids=(token,), logprobs=(0.0,))
    if prompt := generation.prompt_tokens:
        message.prefill_tokens.CopyFrom(pb.PrefillTokens(ids=prompt.ids, logprobs=prompt.logprobs))
    return message


def _sampling(message: pb.SamplingParameters) -> parameters.SamplingParameters:
    if not (message.do_sample or message.ByteSize()):
        return parameters.SamplingParameters()
    return parameters.SamplingParameters(
        do_sample=message.do_sample,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        typical_p=message.typical_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        seed=message.seed,
        watermark=message.watermark,
        logit_bias=dict(message.logit_bias),
    )


def grammar(message: pb.Grammar) -> parameters.Grammar:
    return parameters.Grammar(_GRAMMAR_TYPES[message.type], message.value, message.text)


def _copy(message: pb.BlockCopy) -> BlockCopy:
    return BlockCopy(message.source, message.target, message.tokens)
