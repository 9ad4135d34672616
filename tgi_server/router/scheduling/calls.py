"""Builds the messages of `generate.proto` for the scheduler's calls to the shards."""

from collections.abc import Iterable

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import BlockCopy, Grammar, Image, StateSave
from tgi_server.router.submission import PreparedRequest
from tgi_server.wire import (
    block_copy_to_message,
    grammar_to_message,
    image_to_message,
    members,
    sampling_to_message,
    thought_budget_to_message,
)


def request_message(request: PreparedRequest, adapter_key: str = "") -> pb.Request:
    """Returns a message with the fields of a request that never change, except its grammar and images.

    adapter_key: the key of its adapter in the shards; empty: it has none.
    Raises ValueError, TypeError or OverflowError for a value that the message cannot hold.
    """
    options = request.options
    budget = options.thought_budget
    return pb.Request(
        id=request.id,
        input_ids=request.input_ids,
        adapter_id=adapter_key,
        sampling=sampling_to_message(options.sampling),
        trace_context=request.trace_context,
        thought_budget=None if budget is None else thought_budget_to_message(budget),
        **members(options.stopping),
        **members(options.report),
    )


def complete_request(
    message: pb.Request,
    *,
    generated_ids: Iterable[int],
    block_ids: Iterable[int],
    cached_tokens: int,
    copy: BlockCopy | None,
    prefill_logprobs: bool,
    earlier_reply: Iterable[int],
    snapshot: int,
    closing: bool = False,
) -> None:
    """Sets the fields of a request that depend on its state when it joins the shards' batch."""
    message.generated_ids[:] = generated_ids
    message.block_ids[:] = block_ids
    message.cached_tokens = cached_tokens
    message.prefill_logprobs = prefill_logprobs
    message.earlier_reply[:] = earlier_reply
    message.snapshot = snapshot
    message.closing = closing
    message.ClearField("copy")
    if copy is not None:
        message.copy.CopyFrom(block_copy_to_message(copy))


def prefill_call(
    batch_id: int,
    joining: Iterable[tuple[pb.Request, Grammar | None, Iterable[Image]]],
    chunks: Iterable[tuple[int, int]],
    grants: Iterable[tuple[int, int]],
    saves: Iterable[StateSave] = (),
    *,
    decode: bool,
    closing: Iterable[int] = (),
) -> pb.Call:
    """Returns the call of a step that computes prompt tokens.

    joining: message, grammar and images of each request that joins the batch. Grammars and images may be large, and are
    copied into the call only. chunks: request ids and numbers of tokens to compute. grants: request ids and blocks.
    saves: states to copy into snapshots. decode: True if the other sequences advance by a token. closing: ids of
    requests whose grammars have to complete their texts.
    """
    messages = list(joining)
    call = pb.Call(
        prefill=pb.PrefillRequest(
            batch_id=batch_id,
            requests=[message for message, _, _ in messages],
            chunks=[pb.Chunk(request_id=request_id, tokens=tokens) for request_id, tokens in chunks],
            grants=_grants(grants),
            saves=_saves(saves),
            decode=decode,
            closing=closing,
        )
    )
    for request, (_, grammar, images) in zip(call.prefill.requests, messages, strict=True):
        if grammar is not None:
            request.grammar.CopyFrom(grammar_to_message(grammar))
        request.images.extend(map(image_to_message, images))
    return call


def decode_call(
    batch_id: int,
    grants: Iterable[tuple[int, int]],
    saves: Iterable[StateSave] = (),
    closing: Iterable[int] = (),
) -> pb.Call:
    return pb.Call(
        decode=pb.DecodeRequest(batch_id=batch_id, grants=_grants(grants), saves=_saves(saves), closing=closing)
    )


def filter_call(batch_id: int, keep: Iterable[int]) -> pb.Call:
    return pb.Call(filter_batch=pb.FilterBatchRequest(batch_id=batch_id, keep_request_ids=keep))


def clear_call() -> pb.Call:
    """Returns the call that makes the shards drop all batches."""
    return pb.Call(clear_cache=pb.ClearCacheRequest())


def _grants(grants: Iterable[tuple[int, int]]) -> list[pb.Grant]:
    return [pb.Grant(request_id=request_id, block_ids=(block,)) for request_id, block in grants]


def _saves(saves: Iterable[StateSave]) -> list[pb.StateSave]:
    return [pb.StateSave(request_id=save.request_id, length=save.length, snapshot=save.snapshot) for save in saves]
