"""Tokenizers of GGUF files give the tokens that the original ones do."""

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tests.published_tokenizers import PUBLISHED
from tgi_server.gguf import tokenizer
from tgi_server.gguf.file import Gguf
from tgi_server.gguf.paths import GgufError
from tgi_server.gguf.tokenizer import Vocabulary, tokenizer_config, tokenizer_json

TEXTS = (
    "",
    " ",
    "The quick brown fox",
    "  two  spaces   and\ttabs\n\n\nlines \n ",
    "It's we'LL 'Tis don't 12 345 6789 3.14",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u1780\u17b6\u1793",
    "\U0001f680 emoji \U0001f636\u200d\U0001f32b\ufe0f joined e\u0301",
    "def f(x):\n    return x ** 2  # ======\n",
)


def file_of(**metadata: Any) -> Gguf:
    named = {f"tokenizer.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return Gguf(Path("model.gguf"), {"general.architecture": "llama", **named}, {}, "")


def ids(file: Gguf, text: str) -> list[int]:
    return Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file)))).encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def trained(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, bool]:
    """A BPE vocabulary of SentencePiece with byte tokens, as Llama 2 and Gemma have one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[2:7] * 3, "the fox then rests in the shade of the old oaks"] * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), request.param


def test_sentence_piece(trained: tuple[sentencepiece.SentencePieceProcessor, bool]) -> None:
    original, prefix = trained
    places = range(original.get_piece_size())
    kinds = [
        6 if original.is_byte(each) else 2 if original.is_unknown(each) else 3 if original.is_control(each) else 1
        for each in places
    ]
    file = file_of(
        ggml__model="llama",
        ggml__tokens=[original.id_to_piece(each) for each in places],
        ggml__scores=[original.get_score(each) for each in places],
        ggml__token_type=kinds,
        ggml__add_space_prefix=prefix,
        ggml__unknown_token_id=0,
    )
    made = Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file))))
    for text in TEXTS:
        assert made.encode(text, add_special_tokens=False).ids == original.encode(text), text
        assert made.decode(original.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("name", "pre", "digits"), [("llama3.1", "llama-bpe", r"\p{N}{1,3}"), ("qwen3", "qwen2", r"\p{N}")]
)
def test_byte_level(name: str, pre: str, digits: str) -> None:
    published = PUBLISHED[name]
    content = published.definition
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    pattern = {"Regex": rf"{words}|\s*[\r\n]+|\s+(?!\S)|\s+"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated"}
    steps = [split | {"invert": False}, *content["pre_tokenizer"]["pretokenizers"][1:]]
    original = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}))
    vocabulary = published.tokenizer.get_vocab(with_added_tokens=True)
    special = {each["id"] for each in content["added_tokens"] if each["special"]}
    added = {each["id"] for each in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    file = file_of(
        ggml__model="gpt2",
        ggml__pre=pre,
        ggml__tokens=tokens,
        ggml__token_type=[3 if each in special else 4 if each in added else 1 for each in range(len(tokens))],
        ggml__merges=[" ".join(pair) for pair in content["model"]["merges"]],
        ggml__eos_token_id=published.end,
    )
    made = Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file))))
    for text in (*TEXTS[:-2], published.eos + "text" + published.eos, "cafe\u0301 \u1112\u1161"):
        expected = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == expected, text
    assert Vocabulary(file).end_ids()[0] == published.end


@pytest.mark.parametrize("pre", tokenizer.SPLITS)
def test_every_kind_of_splitting_keeps_the_text(pre: str) -> None:
    file = file_of(ggml__model="gpt2", ggml__pre=pre, ggml__tokens=sorted(ByteLevel.alphabet()), ggml__merges=[])
    made = Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file))))
    for text in TEXTS:
        assert made.decode(made.encode(text).ids) in (text, unicodedata.normalize("NFC", text))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("kimi-k2", "\u4e2d\u6587word's 1234", ["\u4e2d\u6587", "word's", " ", "123", "4"]),
        ("superbpe", "by the way, 1234567", ["by the way, ", "1", "234", "567"]),
        ("chameleon", "a  b12,c\n", ["a", "  ", "b", "1", "2", ",", "c", "\n"]),
        ("afmoe", "12345 \u4e2d\u6587 word", ["12", "345", " ", "\u4e2d\u6587", " word"]),
    ],
)
def test_words_are_those_of_llama_cpp(pre: str, text: str, words: list[str]) -> None:
    file = file_of(ggml__model="gpt2", ggml__pre=pre, ggml__tokens=sorted(ByteLevel.alphabet()), ggml__merges=[])
    splits = Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file)))).pre_tokenizer
    assert [text[first:last] for _, (first, last) in splits.pre_tokenize_str(text)] == words


def test_pairs_of_texts() -> None:
    """As in Gemma 4: spaces are written as SentencePiece does, and what is no token is taken byte by byte."""
    tokens = ["<unk>", "\u2581", "a", "b", "\u2581a", "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, *[1] * 6, *[6] * 256]
    file = file_of(
        ggml__model="gemma4",
        ggml__tokens=tokens,
        ggml__token_type=kinds,
        ggml__merges=["\u2581 a", "\n \n"],
        ggml__unknown_token_id=0,
    )
    made = Tokenizer.from_str(json.dumps(tokenizer_json(Vocabulary(file))))
    encoded = made.encode("a ab\n\n\u00e9")
    assert encoded.tokens == ["a", "\u2581a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    assert made.decode(encoded.ids) == "a ab\n\n\u00e9"


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_piece(lowercase: bool) -> None:
    """Files mark the first piece of a word, where the original marks the others."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, "the", "quick", "fox", "##es", "un", "##quick", "Fox", ",", "\u4f60", "##s", "e", "3", "."]
    original = BertWordPieceTokenizer({word: place for place, word in enumerate(words)}, lowercase=lowercase)
    stored = [
        word if word in special else word.removeprefix("##") if word.startswith("##") else f"\u2581{word}"
        for word in words
    ]
    file = file_of(
        ggml__model="bert",
        ggml__tokens=stored,
        ggml__token_type=[3] * 5 + [1] * (len(words) - 5),
        ggml__unknown_token_id=1,
        ggml__normalizer__lowercase=lowercase,
    )
    for text in (*TEXTS, "The foxes, unquick foxs", "Fox [MASK] \u4f60\u4f60", "\u00e9 3.3"):
        assert ids(file, text) == original.encode(text, add_special_tokens=False).ids, text


def test_special_tokens_and_templates_become_the_configuration() -> None:
    file = file_of(
        ggml__model="llama",
        ggml__tokens=["<unk>", "<s>", "</s>"],
        ggml__scores=[0.0, 0.0, 0.0],
        ggml__token_type=[2, 3, 3],
        ggml__bos_token_id=1,
        ggml__eos_token_id=2,
        chat_template="{{ messages }}",
        chat_template__tool_use="{{ tools }}",
    )
    assert tokenizer_config(Vocabulary(file)) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": [
            {"name": "tool_use", "template": "{{ tools }}"},
            {"name": "default", "template": "{{ messages }}"},
        ],
    }


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], ["<|endoftext|>", "<|im_end|>"]),
        (["<eos>", "<turn|>", "<|turn>", "<|tool_response>"], ["<eos>", "<turn|>", "<|tool_response>"]),
        (["<eos>", "<|tool_response>", "</s>"], ["<eos>", "<|tool_response>"]),  # of Gemma 4, where </s> is HTML
        (["[EOS]", "[EOT]", "[BOS]"], ["[EOS]", "[EOT]"]),
        (["<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),  # of gpt-oss, which goes on after <|end|>
        (["<|flush|>", "<|calls|>", "<|end|>"], ["<|flush|>", "<|calls|>"]),  # of Solar Open, likewise
        (["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], 4),
        (["</s>", "[e~[", "<|eom_id|>", "<|END_OF_TURN_TOKEN|>"], 4),
    ],
)
def test_ends_of_generation_are_those_of_llama_cpp(marks: list[str], ends: list[str] | int) -> None:
    file = file_of(
        ggml__model="gpt2",
        ggml__tokens=["a", *marks],
        ggml__token_type=[1] + [3] * len(marks),
        ggml__eos_token_id=1,
    )
    expected = marks[:ends] if isinstance(ends, int) else ends
    assert [marks[place - 1] for place in Vocabulary(file).end_ids()] == expected


@pytest.mark.parametrize("kind", [0, 1, 5], ids=["undefined", "normal", "unused"])
def test_tokens_that_look_like_marks_are_control_tokens(kind: int) -> None:
    marks = [
        "<|im_start|>",
        "<|im_end|>",
        "<|turn>",
        "<turn|>",
        "<start_of_turn>",
        "<\uff5cUser\uff5c>",
        "<|file_sep|>",
    ]
    words = ["<s>", "<b>", "<?>", "<|>", "<|", "|>", "<div>", "[a]", "</s>"]
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *marks, *words]
    file = file_of(
        ggml__model="gpt2",
        ggml__pre="qwen2",
        ggml__tokens=tokens,
        ggml__token_type=[1] * len(letters) + [kind] * (len(marks) + len(words)),
        ggml__merges=[],
        ggml__eos_token_id=tokens.index("<|im_end|>"),
    )
    found = tokenizer_json(Vocabulary(file))["added_tokens"]
    assert [each["content"] for each in found if each["special"]] == marks
    assert ids(file, "".join(marks)) == [tokens.index(mark) for mark in marks]
    assert [tokens[place] for place in Vocabulary(file).end_ids()] == ["<|im_end|>", "<turn|>", "<|file_sep|>"]


def test_ordinary_text_that_the_metadata_name_stays_text() -> None:
    """A comma is called the first token of a text in some files, and is never put there."""
    tokens = [",", "<|im_end|>"]
    named = {"ggml__bos_token_id": 0, "ggml__eos_token_id": 1, "ggml__token_type": [1, 3]}
    plain = file_of(ggml__model="gpt2", ggml__tokens=tokens, ggml__add_bos_token=False, **named)
    assert tokenizer_config(Vocabulary(plain)) == {
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "add_eos_token": False,
    }
    begun = file_of(ggml__model="gpt2", ggml__tokens=tokens, ggml__add_bos_token=True, **named)
    assert tokenizer_config(Vocabulary(begun))["bos_token"] == ","


def test_tokens_that_the_metadata_name_beyond_the_vocabulary_are_none() -> None:
    file = file_of(ggml__model="gpt2", ggml__tokens=["a", "<|im_end|>"], ggml__eos_token_id=7, ggml__eot_token_id=-1)
    assert Vocabulary(file).end_ids() == [1]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__model": "rwkv", "ggml__tokens": ["a"]}, "has a tokenizer of the kind 'rwkv'"),
        ({"ggml__model": "gpt2", "ggml__pre": "new", "ggml__tokens": ["a"]}, "ggml.pre is 'new', which is not read"),
        ({"ggml__model": "gpt2"}, "has no tokenizer.ggml.tokens"),
        ({"ggml__model": "llama", "ggml__tokens": ["a"]}, "has no tokenizer.ggml.scores"),
    ],
)
def test_what_is_not_read_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        ids(file_of(**metadata), "text")
