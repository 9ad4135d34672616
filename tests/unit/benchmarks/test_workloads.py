"""The loads: who sends what."""

from dataclasses import replace
from itertools import pairwise

from benchmarks.words import COMMON
from benchmarks.workloads import GREETING, WORKLOADS, Workload

CHAT = Workload("chat", users=2, words=12, new_tokens=4, turns=3, repeat=2)


def test_every_prompt_is_different_and_has_the_number_of_words_asked_for() -> None:
    said = [text for user in range(2) for turns in CHAT.prompts(0, user) for text in turns]
    assert len(set(said)) == CHAT.requests == 12
    assert {len(text.split()) for text in said} == {12}


def test_the_same_seed_makes_the_same_prompts_and_another_seed_others() -> None:
    assert list(CHAT.prompts(1, 0)) == list(CHAT.prompts(1, 0))
    assert list(CHAT.prompts(1, 0)) != list(CHAT.prompts(2, 0))


def test_loads_of_equal_lengths_have_different_prompts() -> None:
    short, crowd = (list(WORKLOADS[name].prompts(0, 0)) for name in ("W3", "W4"))
    assert not any(prompt in short for prompt in crowd)


def test_a_load_without_words_sends_the_greeting() -> None:
    assert list(WORKLOADS["W1"].prompts(5, 3)) == [[GREETING]] * WORKLOADS["W1"].repeat


def test_a_model_that_says_successors_repeats_what_stands_in_the_prompt() -> None:
    load = WORKLOADS["W8"]
    ((prompt,), (other,), *_) = load.prompts(0, 0)
    words = prompt.split()
    assert (len(words), len(set(words))) == (300, 298)
    assert prompt != other
    said = words[-1:]
    while len(said) <= load.new_tokens:
        said.append(COMMON[(COMMON.index(said[-1]) + 1) % len(COMMON)])
    assert set(said) <= set(words)
    steps = list(pairwise(words))
    assert sum(pair in steps for pair in pairwise(said)) >= 0.9 * load.new_tokens


def test_users_name_the_adapters_in_turn() -> None:
    load = WORKLOADS["W7"]
    assert [load.adapter(user) for user in (0, 1, 8)] == ["adapter-0", "adapter-1", "adapter-0"]
    assert replace(load, adapters=0).adapter(3) is None


def test_a_shorter_run_begins_as_the_longer_one_does() -> None:
    assert list(replace(CHAT, repeat=1).prompts(0, 1)) == list(CHAT.prompts(0, 1))[:1]


def test_a_public_load_has_its_tokens_and_a_short_form() -> None:
    load, short = WORKLOADS["7680/512"], WORKLOADS["7680/512-short"]
    assert (load.users, load.new_tokens, load.usual) == (32, 512, False)
    assert abs(load.words * 1.12 - 7680) < 2  # type: ignore[operator]
    assert (short.users, short.words, short.new_tokens) == (4, load.words, 64)
    assert 7680 + 512 < load.length < 10_000
    assert all(WORKLOADS[name].length <= 2048 for name in ("W1", "W2", "W3", "W4", "W5", "W6"))
