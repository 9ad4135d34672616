"""Converts the engine's types to messages of `generate.proto`, and back."""

from collections.abc import Iterable

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import StateSave
from tgi_server.engine.load_parts import LoadedModel
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.step import Generation, StepResult
from tgi_server.wire import (
    block_copy_from_message,
    finish_reason_to_message,
    grammar_from_message,
    image_from_message,
    report_from_message,
    sampling_from_message,
    stopping_from_message,
    thought_budget_from_message,
)


def info(model: LoadedModel, model_id: str, revision: str | None, world_size: int) -> pb.InfoResponse:
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
        speculate=model.speculate,
        grammars=model.grammars,
        forward_pass=model.forward_pass,
        quantization=model.quantization,
        linear_kernels=model.linear_kernels,
        kv_cache_dtype=model.kv_cache_dtype,
        states=model.states,
        images=model.images,
        no_images=model.no_images,
        whole_images=model.whole_images,
        weight_bytes=model.weight_bytes,
    )


def capacity(capacity: CacheCapacity, fallbacks: Iterable[str]) -> pb.WarmupResponse:
    return pb.WarmupResponse(
        num_blocks=capacity.num_blocks,
        max_total_tokens=capacity.max_total_tokens,
        max_batch_total_tokens=capacity.max_batch_total_tokens,
        fallbacks=fallbacks,
        num_snapshots=capacity.num_snapshots,
        max_batch_size=capacity.max_batch_size,
        max_prefill_tokens=capacity.max_prefill_tokens,
    )


def sequence(request: pb.Request) -> RunningSequence:
    """Returns a request as the engine's type. Raises InvalidCall if it has no tokens to compute."""
    return RunningSequence(
        request_id=request.id,
        input_ids=list(request.input_ids),
        generated_ids=list(request.generated_ids),
        sampling=sampling_from_message(request.sampling),
        stopping=stopping_from_message(request),
        report=report_from_message(request),
        grammar=grammar_from_message(request.grammar) if request.HasField("grammar") else None,
        thought_budget=(
            thought_budget_from_message(request.thought_budget) if request.HasField("thought_budget") else None
        ),
        closing=request.closing,
        blocks=list(request.block_ids),
        computed=request.cached_tokens,
        adapter_id=request.adapter_id,
        snapshot=request.snapshot,
        earlier_reply=list(request.earlier_reply),
        images=[image_from_message(image) for image in request.images],
        copy=block_copy_from_message(request.copy) if request.HasField("copy") else None,
    )


def grants(messages: Iterable[pb.Grant]) -> list[tuple[int, list[int]]]:
    return [(grant.request_id, list(grant.block_ids)) for grant in messages]


def saves(messages: Iterable[pb.StateSave]) -> list[StateSave]:
    return [StateSave(save.request_id, save.length, save.snapshot) for save in messages]


def step_response(result: StepResult) -> pb.StepResponse:
    return pb.StepResponse(
        generations=[_generation(generation) for generation in result.generations],
        drafted_tokens=result.drafted,
        accepted_tokens=result.accepted,
        timings=pb.Timings(
            forward_ns=result.forward_ns,
            sampling_ns=result.total_ns - result.forward_ns,
            total_ns=result.total_ns,
        ),
    )


def _generation(generation: Generation) -> pb.Generation:
    message = pb.Generation(
        request_id=generation.request_id,
        token_ids=(generation.token_id, *generation.jump_forward),
        hidden=generation.hidden,
        error=generation.error or "",
        drafted=generation.drafted,
        finish_reason=finish_reason_to_message(generation.finish_reason),
    )
    if generation.logprob is not None:
        # The grammar forces jump-forward tokens, so their probability is 1.
        message.logprobs.extend((generation.logprob, *(0.0 for _ in generation.jump_forward)))
    if top := generation.top_tokens:
        message.top_tokens.add(ids=top.ids, logprobs=top.logprobs)
        for token in generation.jump_forward:
            message.top_tokens.add(ids=(token,), logprobs=(0.0,))
    if prompt := generation.prompt_tokens:
        message.prefill_tokens.CopyFrom(pb.PrefillTokens(ids=prompt.ids, logprobs=prompt.logprobs))
        for tokens in prompt.top:
            message.prefill_tokens.top_tokens.add(
                ids=[token for token, _ in tokens], logprobs=[value for _, value in tokens]
            )
    return message
