from dataclasses import replace
from typing import Any, cast

import pytest

from tests.fakes.simulation import AdapterShards
from tests.fakes.vocabularies import sentence_piece
from tests.grammars import compiler_fault, left_to_model
from tests.unit.router.test_options import LIMITS
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.answers.reasoning import reasoning_tags
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.option_reader import OptionReader
from tgi_server.router.options import Dialect
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.grammar import token_grammar
from tgi_server.router.text.preparation import Preparer, grammar_refusal
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tokenizer import TokenizerThreads

ADAPTERS = Adapters(cast(Any, AdapterShards()), max_loras=1)


async def compile_grammar(grammar: Grammar, _client: str) -> tuple[str, ...]:
    """The shards' answer."""
    if told := compiler_fault(grammar):
        raise InvalidRequest(f"the grammar cannot be used: {told}")
    return left_to_model(grammar)


async def check(
    inputs: str,
    *,
    refusal: str | None = None,
    grammar: Grammar | None = None,
    dialect: Dialect = Dialect.TGI,
    **fields: Any,
) -> PreparedRequest:
    threads = TokenizerThreads(sentence_piece(), 1)
    try:
        preparer = Preparer(LIMITS, threads, threads.tokenizer.vocab_size, refusal, compile_grammar, ADAPTERS)
        options = OptionReader(LIMITS, threads.tokenizer.vocab_size).read(GenerateParameters(**fields), Dialect.TGI)
        return await preparer.prepare(RenderedPrompt(inputs), replace(options, grammar=grammar), dialect, client="")
    finally:
        threads.close()


async def test_the_prompt_becomes_tokens():
    checked = await check("hello world", max_new_tokens=5)
    assert checked.input_ids[0] == 0
    assert checked.options.stopping.max_new_tokens == 5


async def test_without_a_length_as_many_tokens_as_fit():
    checked = await check("hello")
    assert checked.options.stopping.max_new_tokens == LIMITS.max_total_tokens - len(checked.input_ids)


@pytest.mark.parametrize("dialect", [each for each in Dialect if each is not Dialect.TGI])
async def test_an_answer_is_as_long_as_fits_where_more_is_requested(dialect: Dialect):
    checked = await check("hello", dialect=dialect, max_new_tokens=10**6)
    assert checked.options.stopping.max_new_tokens == LIMITS.max_total_tokens - len(checked.input_ids)
    assert (await check("hello", dialect=dialect, max_new_tokens=3)).options.stopping.max_new_tokens == 3


async def test_the_end_of_a_prompt_survives_truncation():
    whole = (await check("hello hello world")).input_ids
    assert (await check("hello hello world", truncate=2)).input_ids == whole[-2:]
    assert len((await check("a" * 100, truncate=20)).input_ids) == 20


@pytest.mark.parametrize(
    ("inputs", "fields", "fault"),
    [
        ("", {}, "must not be empty"),
        ("a" * 21, {}, "`inputs` must have less than 21 tokens. Given: "),
        ("hello", {"max_new_tokens": 30}, r"must be <= 30. Given: \d+ `inputs` tokens and 30 `max_new_tokens`"),
        ("hello", {"adapter_id": "mine"}, "adapter_id"),
    ],
)
async def test_a_request_that_breaks_a_rule_is_refused(inputs: str, fields: dict[str, Any], fault: str):
    with pytest.raises(InvalidRequest, match=fault):
        await check(inputs, **fields)


async def test_a_budget_of_thoughts_is_prepared_without_a_grammar():
    async def compile_grammar(_grammar: Grammar, _client: str) -> tuple[str, ...]:
        raise AssertionError("there is no grammar to compile")

    threads = TokenizerThreads(sentence_piece(), 1)
    thoughts = reasoning_tags("qwen3", "")
    try:
        size = threads.tokenizer.vocab_size
        preparer = Preparer(LIMITS, threads, size, None, compile_grammar, ADAPTERS, thoughts=thoughts)
        for tokens in (None, -1, 3, 4):
            options = OptionReader(LIMITS, size).read(GenerateParameters(thinking_token_budget=tokens), Dialect.TGI)
            checked = await preparer.prepare(RenderedPrompt("hello"), options, Dialect.TGI, client="")
            budget = checked.options.thought_budget
            assert (None if budget is None else budget.tokens) == (tokens if tokens and tokens > 0 else None)
        refusing = Preparer(LIMITS, threads, size, "no grammars here", compile_grammar, ADAPTERS, thoughts=thoughts)
        with pytest.raises(InvalidRequest, match="thinking_token_budget` cannot be used: no grammars here"):
            await refusing.prepare(RenderedPrompt("hello"), options, Dialect.TGI, client="")
    finally:
        threads.close()


async def test_grammars_are_checked():
    regex = Grammar(GrammarKind.REGEX, "[a-z]+")
    assert (await check("hello", grammar=regex)).options.grammar == regex
    broken = Grammar(GrammarKind.REGEX, "[")
    with pytest.raises(InvalidRequest, match="the grammar cannot be used"):
        await check("hello", grammar=broken)


async def test_spans_are_taken_from_the_prompt():
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "x-span": true}')
    grammar = (await check("hello world", grammar=schema)).options.grammar
    assert grammar is not None
    assert grammar.text == "hello world"


async def test_allowed_tokens_are_a_grammar_and_go_with_no_other():
    allowed = (await check("hello", allowed_token_ids=[7, 5])).options.grammar
    assert allowed is not None
    assert allowed.type is GrammarKind.LARK
    assert allowed.value.endswith("start: <[5,7]> start\n")
    with pytest.raises(InvalidRequest, match="allowed_token_ids` cannot be used with a grammar"):
        await check("hello", allowed_token_ids=[7], grammar=Grammar(GrammarKind.REGEX, "a"))


def test_a_token_that_ends_a_text_may_be_allowed():
    assert token_grammar([7, 1], [1]).value.endswith("start: <[7]>*\n")
    assert token_grammar([1], [1]).value.endswith('start: ""*\n')


async def test_grammars_may_be_refused():
    with pytest.raises(InvalidRequest, match="none here"):
        await check("hello", grammar=Grammar(GrammarKind.REGEX, "[a-z]+"), refusal="none here")
    assert (await check("hello", refusal="none here")).options.grammar is None


def test_why_grammars_are_refused():
    assert grammar_refusal(disabled=False, supported=True) is None
    assert "--disable-grammar-support" in (grammar_refusal(disabled=True, supported=True) or "")
    assert "shards" in (grammar_refusal(disabled=False, supported=False) or "")


async def test_several_sequences_have_seeds_of_their_own():
    checked = await check("hello", do_sample=True, seed=7)
    sequences = checked.times(3)
    assert sequences[0].seed == 7
    assert len({each.seed for each in sequences}) == 3
    assert replace(sequences[1], options=checked.options) == checked


@pytest.mark.parametrize("seed", [7, 2**64 - 1])
async def test_several_sequences_have_the_same_seeds_for_the_same_request(seed: int):
    first, second = [(await check("hello", do_sample=True, seed=seed)).times(3) for _ in range(2)]
    assert first == second
    assert [each.seed for each in first] == [seed, (seed + 1) % 2**64, (seed + 2) % 2**64]


async def test_without_a_seed_the_same_request_has_others():
    first, second = [(await check("hello", do_sample=True)).times(3) for _ in range(2)]
    assert {each.seed for each in first}.isdisjoint(each.seed for each in second)


async def test_greedy_requests_report_no_seed():
    assert (await check("hello", seed=7)).seed is None
