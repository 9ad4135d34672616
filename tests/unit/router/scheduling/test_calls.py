from shared.stubs import generate_pb2 as pb
from tests.fakes.recording_sink import recorded_request
from tgi_server.contract import BlockCopy, Grammar, GrammarKind, SamplingParameters, StateSave
from tgi_server.router.scheduling import calls


def test_a_request_s_message_has_all_that_does_not_change() -> None:
    request, _ = recorded_request(
        7,
        [1, 2],
        5,
        ignore_eos=False,
        top_n_tokens=3,
        sampling=SamplingParameters(do_sample=True, seed=11, logit_bias={4: -2.0}),
        grammar=Grammar(GrammarKind.LARK, "start: /a/"),
        adapter_id="chef",
        trace_context={"traceparent": "00-1"},
    )
    message = calls.request_message(request, "chef#3")
    assert (message.id, list(message.input_ids), message.max_new_tokens, message.top_n_tokens) == (7, [1, 2], 5, 3)
    assert not message.ignore_eos
    assert (message.sampling.seed, dict(message.sampling.logit_bias)) == (11, {4: -2.0})
    sent = calls.prefill_call(3, [(message, request.options.grammar, ())], [], [], decode=False).prefill.requests[0]
    assert (sent.grammar.type, sent.grammar.value) == (pb.Grammar.LARK, "start: /a/")
    assert not message.HasField("grammar")
    assert (message.adapter_id, dict(message.trace_context)) == ("chef#3", {"traceparent": "00-1"})


def test_a_message_is_completed_anew_each_time_the_request_joins() -> None:
    message = calls.request_message(recorded_request(7, [1, 2])[0])
    first = {"generated_ids": (), "block_ids": (3,), "cached_tokens": 1, "copy": BlockCopy(2, 3, 1), "snapshot": 4}
    calls.complete_request(message, **first, prefill_logprobs=True, earlier_reply=(7, 8))
    assert (list(message.block_ids), message.cached_tokens, message.copy.source) == ([3], 1, 2)
    assert (list(message.earlier_reply), message.snapshot) == ([7, 8], 4)
    again = {"generated_ids": (9,), "block_ids": (4, 5), "cached_tokens": 0, "copy": None, "snapshot": 0}
    calls.complete_request(message, **again, prefill_logprobs=False, earlier_reply=())
    assert not message.earlier_reply
    assert not message.snapshot
    assert (list(message.generated_ids), list(message.block_ids), message.cached_tokens) == ([9], [4, 5], 0)
    assert not message.HasField("copy")
    assert not message.prefill_logprobs


def test_calls() -> None:
    joining = calls.request_message(recorded_request(7, [1, 2])[0])
    prefill = calls.prefill_call(3, [(joining, None, ())], [(7, 2)], [(6, 9)], decode=True).prefill
    assert (prefill.batch_id, prefill.requests[0].id, prefill.decode) == (3, 7, True)
    assert [(chunk.request_id, chunk.tokens) for chunk in prefill.chunks] == [(7, 2)]
    assert [(grant.request_id, list(grant.block_ids)) for grant in prefill.grants] == [(6, [9])]
    assert not prefill.saves
    assert calls.decode_call(3, [(6, 9)]).decode.grants == prefill.grants
    (save,) = calls.decode_call(3, [], [StateSave(6, 32, 5)]).decode.saves
    assert (save.request_id, save.length, save.snapshot) == (6, 32, 5)
    assert list(calls.filter_call(3, [6]).filter_batch.keep_request_ids) == [6]
    assert calls.clear_call().HasField("clear_cache")
