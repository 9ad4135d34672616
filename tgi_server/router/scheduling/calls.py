"""The scheduler's calls to the shards as messages of `generate.proto`."""

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
    """Returns everything about a request that does not change while it is scheduled, but for its grammar and images.

    adapter_key: the name that the shards know its adapter by; empty: it has none.
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
    """Adds what a request has, or has become, when it joins the shards' batch."""
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
    """joining: messages, and grammars and images, which may be long: there is a copy of these only while it is sent.

    chunks: request ids and tokens to compute. grants: request ids and blocks. saves: states to copy into snapshots.
    closing: requests whose grammars are to end their texts.
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
    """Returns the call that makes the shards forget whatever batch they hold."""
    return pb.Call(clear_cache=pb.ClearCacheRequest())


def _grants(grants: Iterable[tuple[int, int]]) -> list[pb.Grant]:
    return [pb.Grant(request_id=request_id, block_ids=(block,)) for request_id, block in grants]


def _saves(saves: Iterable[StateSave]) -> list[pb.StateSave]:
    return [pb.StateSave(request_id=save.request_id, length=save.length, snapshot=save.snapshot) for save in saves]
