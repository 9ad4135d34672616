"""Grammars work with every kind of tokenizer, also with characters of several bytes."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.grammars import following_fault
from tests.published_tokenizers import PUBLISHED, Published
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make_llama
from tests.unit.grammar.conftest import load
from tests.unit.grammar.driver import Driver
from tgi_server.contract import FinishReason, Grammar, GrammarKind
from tgi_server.engine import Engine
from tgi_server.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.grammar.tokenizer import GrammarTokenizer, _byte_tokenizer, _spelled

PROMPT = [5, 6, 7, 8]
SPECIAL = ["<unk>", "<s>", "</s>"]
SENTENCES = ['the quick brown fox says "größe 123", and {"name": "oak", "age": 45, "ok": true} was its answer'] * 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9, "x-hint": "of the fox"},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
}


def sentence_piece() -> Tokenizer:
    """Returns a tokenizer of Llama 2's kind: spaces are letters, and bytes have tokens of their own."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=TOKENIZER_VOCAB_SIZE,
            special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))],
            show_progress=False,
        ),
    )


def unigram() -> Tokenizer:
    """Returns a tokenizer of T5's kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return trained(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=TOKENIZER_VOCAB_SIZE, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )


def word_piece() -> Tokenizer:
    """Returns a tokenizer of BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return trained(
        tokenizer,
        trainers.WordPieceTrainer(vocab_size=TOKENIZER_VOCAB_SIZE, special_tokens=SPECIAL, show_progress=False),
    )


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(SENTENCES, trainer)
    definition = json.loads(tokenizer.to_str())
    # Byte tokens are trained as special ones; in the models they are ordinary tokens.
    definition["added_tokens"] = [each for each in definition["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(definition))


def engine_of(tokenizer: Tokenizer, folder: Path) -> Engine:
    make_llama(folder, vocab_size=TOKENIZER_VOCAB_SIZE + 8)  # models often have more ids than their tokenizers
    tokenizer.save(str(folder / "tokenizer.json"))
    return load(folder)


@pytest.fixture(scope="module", params=[sentence_piece, unigram, word_piece])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Engine]:
    tokenizer = request.param()
    return tokenizer, engine_of(tokenizer, tmp_path_factory.mktemp("model"))


def shown(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text as a server shows it: what the prompt's text grows by."""
    before = tokenizer.decode(PROMPT)
    return tokenizer.decode([*PROMPT, *tokens]).removeprefix(before)


def test_regexes(kind: tuple[Tokenizer, Engine]) -> None:
    tokenizer, engine = kind
    pattern = r" ?(quick|brown)( ?[a-z]){1,8}( ?\d){2}"
    driver = Driver(engine)
    grammar = Grammar(GrammarKind.REGEX, pattern)
    for output in driver.run(*(driver.sequence(PROMPT, grammar, 60, seed=seed) for seed in range(8))):
        assert output.error is None
        if output.finish_reason is FinishReason.EOS_TOKEN:
            assert re.fullmatch(pattern, shown(tokenizer, driver.visible(output)))
    assert any(output.finish_reason is FinishReason.EOS_TOKEN for output in driver.outputs.values())


def test_json(kind: tuple[Tokenizer, Engine]) -> None:
    tokenizer, engine = kind
    if isinstance(tokenizer.model, models.WordPiece):
        pytest.skip("its tokens cannot be put side by side without a space between them")
    driver = Driver(engine)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    ended = 0
    for output in driver.run(*(driver.sequence(PROMPT, grammar, 100, seed=seed) for seed in range(8))):
        assert output.error is None
        if output.finish_reason is FinishReason.EOS_TOKEN:
            ended += 1
            value = json.loads(shown(tokenizer, driver.visible(output)))
            assert set(value) == {"name", "age"}
            assert len(driver.visible(output)) < len(output.tokens)
    assert ended


def test_characters_of_several_tokens(random_engine: Engine, tmp_path: Path) -> None:
    for engine in (random_engine, engine_of(sentence_piece(), tmp_path)):
        driver = Driver(engine)
        grammar = Grammar(GrammarKind.REGEX, "[ößé€🌳]{6}")
        for output in driver.run(*(driver.sequence(PROMPT, grammar, 60, seed=seed) for seed in range(4))):
            assert output.finish_reason is FinishReason.EOS_TOKEN
            assert re.fullmatch("[ößé€🌳]{6}", driver.text(output))


def test_several_ends_of_sequence() -> None:
    tokenizer = GrammarTokenizer(sentence_piece().to_str(), TOKENIZER_VOCAB_SIZE, [2, 1])
    assert tokenizer.eos == (2, 1)
    assert set(tokenizer.lookup.eos_tokens) == {1, 2}


def test_markers_are_no_tokens_of_the_model() -> None:
    tokenizer = GrammarTokenizer(sentence_piece().to_str(), TOKENIZER_VOCAB_SIZE + 8, [2])
    assert tokenizer.markers.start >= TOKENIZER_VOCAB_SIZE + 8
    assert tokenizer.encode("the quick fox")
    assert not set(tokenizer.encode("\ue0a0hint 1\ue0a1")) & set(tokenizer.markers)


def test_tokens_that_only_the_tokenizer_knows_are_not_used(tmp_path: Path) -> None:
    """Tokens were added to the tokenizer, and the model has no embeddings of them."""
    tokenizer = sentence_piece()
    tokenizer.add_tokens([*(f"unused {i}" for i in range(8)), "quick fox"])
    engine = engine_of(tokenizer, tmp_path)
    assert tokenizer.token_to_id("quick fox") == engine.info.vocab_size
    schema = {
        "type": "object",
        "properties": {"of": {"const": "the quick fox"}, "age": {"type": "integer", "x-hint": "of the quick fox"}},
        "required": ["of", "age"],
    }
    driver = Driver(engine)
    output = driver.run(driver.sequence(PROMPT, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), 200))[0]
    assert json.loads(driver.text(output))["of"] == "the quick fox"


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_only_special_tokens_are_no_text(published: Published) -> None:
    """Whatever added tokens look like: llguidance takes any in angle brackets for special ones."""
    tokenizer = GrammarTokenizer(json.dumps(published.definition), published.vocab_size, published.end_ids)
    special = {each["id"] for each in published.definition["added_tokens"] if each["special"]}
    known = range(published.tokenizer.get_vocab_size())
    assert {token for token in known if tokenizer.lookup.is_special_token(token)} == special
    for text in published.texts:
        assert tokenizer.lookup.decode_str([published.token_id(text)]) == text
        assert tokenizer.encode(f"a{text}")[-1] == published.token_id(text)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_names_of_special_tokens_in_a_text_are_spelled(published: Published, tmp_path: Path) -> None:
    compiler = GrammarCompiler(published.save(tmp_path), published.vocab_size, published.end_ids)
    special = {each["id"]: each["content"] for each in published.definition["added_tokens"] if each["special"]}
    for name in special.values():
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": f"an {name} b"}))
        compiler.check(grammar)
        constraint = compiler.constraint(grammar, [], 200, ignore_eos=False)
        written = []
        while not constraint.ended:
            assert constraint.error is None, constraint.error
            token = constraint.jump_forward
            assert token is not None
            constraint.advance(token, room=0)
            written.append(token)
        assert compiler.tokenizer.decode(written) == json.dumps(f"an {name} b", ensure_ascii=False)
        assert not special.keys() & set(written)


def test_a_lark_grammar_may_name_any_added_token(tmp_path: Path) -> None:
    published = PUBLISHED["qwen3"]
    compiler = GrammarCompiler(published.save(tmp_path), published.vocab_size, published.end_ids)
    lark = 'start: /[^x]*/ </think> "</think>" <|image_pad|>  // <think>\n'
    tokens = [*compiler.tokenizer.encode("Hm."), *map(published.token_id, ("</think>", "</think>", "<|image_pad|>"))]
    assert following_fault(compiler, Grammar(GrammarKind.LARK, lark), [*tokens, published.end]) is None
    with pytest.raises(InvalidGrammar, match="unknown special token"):
        compiler.check(Grammar(GrammarKind.LARK, "start: <unknown>"))


def test_what_ends_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    """Fine-tunes end their texts with tokens that their tokenizers do not call special."""
    published = PUBLISHED["qwen2.5"]
    folder = published.save(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    for each in content["added_tokens"]:
        each["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ends = [*published.end_ids, published.token_id("Paris")]
    compiler = GrammarCompiler(folder, published.vocab_size, ends)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string"}))
    before = compiler.tokenizer.encode('"a <|im_start|>')
    assert published.token_id("<|im_start|>") in before
    for end in ends:
        assert "the mask forbids" in str(following_fault(compiler, grammar, [*before, end]))
        closed = [*before, compiler.tokenizer.encode('"')[0]]
        assert following_fault(compiler, grammar, [*closed, end]) is None
    spelled = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": "<|im_end|>Paris"}))
    tokens = compiler.tokenizer.encode('"<|im_end|>Paris"')
    assert not set(ends) & set(tokens)
    assert following_fault(compiler, spelled, [*tokens, ends[0]]) is None


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_bytes_of_tokens_are_those_that_llguidance_reads(published: Published) -> None:
    special = {each["id"] for each in published.definition["added_tokens"] if each["special"]}
    spelled, known = _spelled(published.definition, special), _byte_tokenizer(json.dumps(published.definition))
    assert (spelled is None) == published.sentence_piece
    assert known is not None
    for token, text in enumerate(spelled or ()):
        assert text == (b"" if token in special else known[1][token])


def test_tokens_that_are_not_made_of_bytes_are_left_to_llguidance() -> None:
    content = json.loads(json.dumps(PUBLISHED["qwen3"].definition))
    assert _spelled(content, ()) is not None
    content["model"]["vocab"]["two words"] = 999  # a space is not among the characters for bytes
    assert _spelled(content, ()) is None
