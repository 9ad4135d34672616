from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tests.fakes.vocabularies import byte_level
from tgi_server.contract import FinishReason
from tgi_server.router.errors import GenerationFailed, IncompleteGeneration, RouterError
from tgi_server.router.text.stop_sequences import StopSequences
from tgi_server.router.text.token_stream import CollectedTokens, TokenStream

TOKENIZER = byte_level()
EOS = 1


class Ends(list[RouterError | None]):
    def __call__(self, error: RouterError | None) -> None:
        self.append(error)


def stream(
    stop: list[str] | None = None, *, reveal: bool = True, **options: Any
) -> tuple[TokenStream[CollectedTokens], Ends]:
    ends = Ends()
    stops = StopSequences(stop, reveal=reveal) if stop else None
    return TokenStream(TOKENIZER, [0, 40], stops, CollectedTokens(), ends, **options), ends


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def generation(*token_ids: int, finish: int = pb.FINISH_REASON_NONE, **fields: Any) -> pb.Generation:
    return pb.Generation(request_id=1, token_ids=token_ids, finish_reason=finish, **fields)


def push_all(target: TokenStream[CollectedTokens], token_ids: list[int], finish: int = pb.FINISH_REASON_LENGTH) -> Any:
    """One token a step, until the stream or the last token ends it."""
    for position, token_id in enumerate(token_ids):
        last = position == len(token_ids) - 1
        stop = target.push(generation(token_id, finish=finish if last else pb.FINISH_REASON_NONE))
        if stop is not None:
            return stop
    return None


def test_a_text_and_its_length():
    target, ends = stream()
    assert push_all(target, ids("hello world")) is None
    target.finished(FinishReason.LENGTH)
    assert (target.output.text, target.output.texts) == ("hello world", ["hello", " world"])
    assert (target.finish_reason, target.generated_tokens, ends) == (FinishReason.LENGTH, 2, [None])


def test_several_tokens_in_one_step():
    target, _ = stream()
    first, second = ids("hello world")
    target.push(generation(first, second, finish=pb.FINISH_REASON_LENGTH, logprobs=[-1.0, -3.0]))
    assert target.output.text == "hello world"
    assert target.output.mean_logprob() == -2.0


def test_special_tokens_are_told_but_are_no_text():
    target, _ = stream()
    push_all(target, [*ids("hello"), EOS], pb.FINISH_REASON_EOS_TOKEN)
    assert target.output.texts == ["hello", "</s>"]
    assert target.output.token_ids == [*ids("hello"), EOS]
    assert (target.output.text, target.generated_tokens) == ("hello", 2)
    assert target.finish_reason is FinishReason.EOS_TOKEN


def test_a_stop_sequence_ends_it():
    target, _ = stream(["or"])
    assert push_all(target, ids("hello world")) is FinishReason.STOP_SEQUENCE
    assert target.output.text == "hello wor"
    assert (target.output.texts[-1], target.output.visible[-1]) == (" world", " wor")
    assert target.finish_reason is FinishReason.STOP_SEQUENCE


def test_a_stop_sequence_may_be_hidden():
    target, _ = stream(["or"], reveal=False)
    assert push_all(target, ids("hello world")) is FinishReason.STOP_SEQUENCE
    assert target.output.text == "hello w"


def test_tokens_behind_a_stop_sequence_are_dropped():
    target, _ = stream(["hello"])
    first, second = ids("hello world")
    assert target.push(generation(first, second)) is FinishReason.STOP_SEQUENCE
    assert (target.output.text, target.generated_tokens) == ("hello", 1)
    assert target.push(generation(second)) is FinishReason.STOP_SEQUENCE
    assert target.generated_tokens == 1


def test_held_back_text_comes_with_the_last_token():
    target, _ = stream([" world!"], reveal=False)
    push_all(target, ids("hello world"))
    assert target.output.text == "hello world"


@pytest.mark.parametrize("stop", ["hello world", "hello wor", "hello world!"])
@pytest.mark.parametrize("reveal", [True, False])
def test_a_token_has_its_own_text_whatever_is_held_back_or_cut_off(stop: str, reveal: bool):
    target, _ = stream([stop], reveal=reveal)
    push_all(target, ids("hello world"))
    assert target.output.texts == ["hello", " world"]


def test_a_stop_sequence_may_name_a_special_token():
    for reveal in (True, False):
        target, _ = stream(["</s>"], reveal=reveal)
        assert push_all(target, [*ids("hello"), EOS, *ids("hello")]) is FinishReason.STOP_SEQUENCE
        assert target.output.text == "hello"


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("stop", ["s", ">", "</", "</s>\n"])
def test_a_part_of_the_name_of_a_special_token_is_no_stop_sequence(stop: str, reveal: bool):
    target, _ = stream([stop], reveal=reveal)
    push_all(target, [*ids("he"), EOS], pb.FINISH_REASON_EOS_TOKEN)
    assert (target.output.text, target.finish_reason) == ("he", FinishReason.EOS_TOKEN)
    if not stop.endswith("\n"):
        target, _ = stream([stop], reveal=reveal)
        push_all(target, [*ids("he"), EOS, *ids("ll")])
        assert (target.output.text, target.finish_reason) == ("hell", FinishReason.LENGTH)


def test_a_token_with_which_the_model_ends_a_text_is_no_part_of_it_if_it_is_not_special():
    hello, world = ids("hello world")
    for stop in (None, ["world"]):
        target, _ = stream(stop, reveal=False)
        push_all(target, [hello, *ids("🍕")[:2], world], pb.FINISH_REASON_EOS_TOKEN)
        assert (target.output.text, target.finish_reason) == ("hello\ufffd", FinishReason.EOS_TOKEN)
        assert target.output.texts[-1] == " world"


def test_an_incomplete_character_at_the_end_is_part_of_the_last_token():
    target, _ = stream()
    push_all(target, ids("a🍕")[:2])
    assert target.output.texts == ["a", "\ufffd"]
    assert target.output.text == "a\ufffd"


def test_an_end_before_the_first_token_is_a_failure():
    target, ends = stream()
    target.finished(FinishReason.LENGTH)
    assert isinstance(ends[0], IncompleteGeneration)


def test_the_last_tokens_may_be_such_that_nobody_sees():
    target, ends = stream([" world"], reveal=False)
    target.push(generation(*ids("hello"), *ids(" w")))
    target.push(generation(finish=pb.FINISH_REASON_LENGTH))
    target.finished(FinishReason.LENGTH)
    assert ends == [None]
    assert (target.output.text, target.finish_reason) == ("hello w", FinishReason.LENGTH)


def test_failures_are_passed_on():
    target, ends = stream()
    error = GenerationFailed("no shard")
    target.failed(error)
    assert ends == [error]


def test_times_go_forward():
    target, _ = stream()
    target.started(0)
    push_all(target, ids("hello"))
    assert target.queued_at <= target.started_at <= target.ended_at


def test_what_details_need():
    target, _ = stream()
    (hello,) = ids("hello")
    target.push(
        generation(
            hello,
            finish=pb.FINISH_REASON_LENGTH,
            logprobs=[-0.5],
            top_tokens=[pb.TopTokens(ids=[hello], logprobs=[-0.5])],
            prefill_tokens=pb.PrefillTokens(ids=[0, 40], logprobs=[float("nan"), -2.0]),
        )
    )
    assert target.output.logprobs == [-0.5]
    assert list(target.output.top_tokens[0].ids) == [hello]
    assert target.prefill is not None
    assert list(target.prefill.ids) == [0, 40]


@pytest.mark.parametrize("stop", [None, ["zzz"]])
def test_a_stream_without_logprobs(stop: list[str] | None):
    target, _ = stream(stop)
    push_all(target, ids("hello"))
    assert target.output.logprobs == [None]
    assert target.output.mean_logprob() == float("-inf")


def test_a_token_that_ends_the_text_is_no_part_of_it():
    hello, world = ids("hello world")
    target, _ = stream(["held"], reveal=False, stop_ids={world})
    assert push_all(target, [hello, *ids(" h"), world, hello]) is FinishReason.EOS_TOKEN
    assert (target.output.text, target.finish_reason) == ("hello h", FinishReason.EOS_TOKEN)


def test_nothing_that_the_request_names_ends_a_text_too_early():
    hello, world = ids("hello world")
    target, _ = stream(["hello"], stop_ids={world}, min_tokens=3)
    assert push_all(target, [hello, world, hello, world, hello]) is FinishReason.EOS_TOKEN
    assert target.output.text == "hello worldhello"
    target, _ = stream(["hello"], min_tokens=2)
    assert push_all(target, [hello, world, hello, world]) is FinishReason.STOP_SEQUENCE
    assert target.output.text == "hello worldhello"


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize(
    ("stops", "least", "shown", "cut"),
    [
        (["hello world"], 1, "hello world", ""),  # begins within the first tokens, and is complete behind them
        (["world hello"], 2, "hello world hello", "hello "),
        (["hello world"], 2, "hello world hello world", "hello world "),  # is complete within them, and once more
        (["hello", "hello world"], 1, "hello world", ""),  # the shorter one is complete within them
        (["world", "world hello"], 2, "hello world hello", "hello "),
        (["lo w"], 1, "hello w", "hel"),
        (["never"], 1, "hello world hello world", "hello world hello world"),
        (["world hello world hello"], 3, "hello world hello world", "hello world hello world"),
    ],
)
def test_stop_sequences_that_begin_within_the_least_tokens(
    stops: list[str], least: int, shown: str, cut: str, reveal: bool
):
    target, _ = stream(stops, min_tokens=least, reveal=reveal)
    reason = push_all(target, [*ids("hello world"), *ids(" hello world"), EOS], pb.FINISH_REASON_EOS_TOKEN)
    ended = shown != "hello world hello world" or cut != shown
    assert reason is (FinishReason.STOP_SEQUENCE if ended else None)
    assert target.output.text == (shown if reveal else cut)


def test_special_tokens_that_are_shown():
    target, _ = stream(shown={0, EOS})
    push_all(target, [0, *ids("hello"), EOS], pb.FINISH_REASON_EOS_TOKEN)
    assert target.output.text == f"{TOKENIZER.special_tokens[0]}hello"


@pytest.mark.parametrize("stop", [None, ["nothing"]])
@pytest.mark.parametrize(("shown", "text"), [((0,), "hello\ufffd<s>b"), ((), "hello\ufffdb")])
def test_a_special_token_behind_a_part_of_a_character(stop: list[str] | None, shown: tuple[int, ...], text: str):
    target, _ = stream(stop, shown=shown)
    push_all(target, [*ids("hello"), *ids("🍕")[:2], 0, *ids("b")])
    assert target.output.text == text
