import asyncio
import json
import re
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from tokenizers import Encoding, Tokenizer, decoders, normalizers

from tests.fakes.vocabularies import BOS, EOS, byte_level, sentence_piece
from tests.published_tokenizers import PUBLISHED
from tgi_server import demo_model
from tgi_server.router.errors import StartupError
from tgi_server.router.text.tokenizer import TextTokenizer, TokenizerThreads, load_tokenizer
from tgi_server.router.text.tokenizer_config import TokenizerConfig, read_tokenizer_config


def save(tokenizer: TextTokenizer, folder: Path) -> None:
    tokenizer._tokenizer.save(str(folder / "tokenizer.json"))


def ids(tokenizer: TextTokenizer, text: str = "hello") -> list[int]:
    return tokenizer.encode(text, add_special_tokens=True).ids


def test_special_tokens_are_known_by_id():
    assert byte_level().special_tokens == {0: BOS, 1: EOS}


def test_token_texts():
    tokenizer = sentence_piece()
    assert tokenizer.token_text(1) == EOS
    assert tokenizer.token_text(260) == " world"


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "first", "last"),
    [(None, None, True, False), (True, True, True, True), (False, None, False, False), (False, True, False, True)],
)
def test_the_configuration_says_what_is_added(tmp_path: Path, add_bos, add_eos, first: bool, last: bool):
    save(sentence_piece(), tmp_path)  # its own file adds BOS
    config = TokenizerConfig({"bos_token": BOS, "eos_token": EOS}, add_bos_token=add_bos, add_eos_token=add_eos)
    tokens = ids(load_tokenizer(tmp_path, config))
    assert (tokens[0] == 0, tokens[-1] == 1) == (first, last)


def test_offsets_count_characters():
    encoding = byte_level().encode("é hello", add_special_tokens=False)
    assert encoding.offsets[-1] == (2, 7)


def test_a_tokenizer_that_truncates_is_told_not_to(tmp_path: Path):
    save(byte_level(), tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(ids(load_tokenizer(tmp_path, TokenizerConfig()), "a b c d")) > 2


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path, TokenizerConfig())


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_doubles_texts_again_and_again_is_refused(tmp_path: Path, part: str):
    """Thirty-two replacements of a letter by two make gigabytes of one."""
    tokenizer = byte_level()._tokenizer
    kind = {"normalizer": normalizers, "decoder": decoders}[part]
    setattr(tokenizer, part, kind.Sequence([kind.Sequence([kind.Replace("a", "aa")] * 8)] * 4))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match=rf"the {part} of the tokenizer may make a text 4.29e\+09 times as long"):
        load_tokenizer(tmp_path, TokenizerConfig())


def test_a_folder_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(StartupError, match="is not a folder"):
        load_tokenizer(tmp_path / "absent", TokenizerConfig())


@pytest.mark.slow
def test_a_model_without_any_tokenizer_is_told(tmp_path: Path):
    with pytest.raises(StartupError, match=r"has no tokenizer\.json and none could be made"):
        load_tokenizer(tmp_path, TokenizerConfig())


@pytest.mark.slow
def test_older_files_are_converted(tmp_path: Path):
    from transformers import GPT2Tokenizer

    tokenizer = byte_level()._tokenizer
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    converted = load_tokenizer(tmp_path, TokenizerConfig())
    assert converted.decode(ids(converted, "hello world")) == "hello world"


async def test_long_texts_do_not_hold_the_event_loop():
    """A heartbeat goes on while a text of a megabyte is tokenised."""
    threads = TokenizerThreads(load_tokenizer(demo_model.PATH, read_tokenizer_config(demo_model.PATH, None)), 1)
    beats: list[float] = []
    loop = asyncio.get_running_loop()

    async def heart() -> None:
        while True:
            beats.append(loop.time())
            await asyncio.sleep(0.001)

    heartbeat = asyncio.create_task(heart())
    started = loop.time()
    text = "rice and beans " * 70_000
    ids = await threads.run(len(text), lambda: threads.tokenizer.encode(text, add_special_tokens=True).ids)
    took = loop.time() - started
    heartbeat.cancel()
    threads.close()
    assert len(ids) > 100_000
    during = [beat for beat in beats if beat > started]
    assert len(during) > took / 0.1


async def test_short_texts_need_no_thread():
    threads = TokenizerThreads(byte_level(), 1)
    assert await threads.handle_text(10, threading.current_thread) is threading.current_thread()
    assert await threads.handle_text(10**6, threading.current_thread) is not threading.current_thread()
    threads.close()


async def test_short_texts_do_not_wait_behind_long_ones():
    threads = TokenizerThreads(byte_level(), 1)
    gate = threading.Event()
    waiting = [asyncio.create_task(threads.run(10**6, gate.wait)) for _ in range(30)]
    await asyncio.wait_for(threads.run(5_000, int), 10)
    gate.set()
    await asyncio.gather(*waiting)
    threads.close()


async def test_of_long_texts_the_shortest_comes_first_and_nobody_waits_for_one_who_left():
    threads = TokenizerThreads(byte_level(), 1)
    gate = threading.Event()
    order: list[int] = []
    running = asyncio.create_task(threads.run(10**6, gate.wait))
    await asyncio.sleep(0)
    sizes = [2_000_000, 40_000, 1_000_000, 50_000]
    waiting = [asyncio.create_task(threads.run(each, lambda each=each: order.append(each))) for each in sizes]
    await asyncio.sleep(0)
    waiting[3].cancel()
    gate.set()
    await asyncio.gather(running, *waiting, return_exceptions=True)
    assert order == [40_000, 1_000_000, 2_000_000]
    await asyncio.wait_for(threads.run(10**6, int), 10)
    threads.close()


@pytest.mark.parametrize("text", ["rice and beans " * 100_000, "\ud7ff" * 1_000_000, "1 " * 500_000])
def test_texts_with_too_many_tokens_are_known_before_all_of_it_is_tokenised(text: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(demo_model.PATH, read_tokenizer_config(demo_model.PATH, None))
    assert not tokenizer.exceeds(text[:60_000], 10)
    assert not tokenizer.exceeds(text, 3 * len(text))
    tokenised: list[int] = []
    encode = tokenizer.encode

    def counted(piece: str, **options: bool) -> Encoding:
        tokenised.append(len(piece))
        return encode(piece, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    assert tokenizer.exceeds(text, 10_000)
    assert sum(tokenised) < 150_000


TEXTS = ["a true story", "größe 🌳 日本", " true", "true", '{"a": [1, 2]}', "x\t\u2028y", "\ufffd", "a  b   c"]
VOCABULARIES = {name: each.tokenizer for name, each in PUBLISHED.items()} | {
    "sentence_piece": sentence_piece()._tokenizer,
    "byte_level": byte_level()._tokenizer,
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_bytes_of_tokens_are_those_of_the_text(name: str):
    tokenizer = TextTokenizer(Tokenizer.from_str(VOCABULARIES[name].to_str()), TokenizerConfig())
    for text in TEXTS:
        if name == "sentence_piece" and "  " in text:
            continue  # its decoder leaves no more spaces than one
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_two_tokens_of_a_vocabulary_have_one_name(name: str):
    tokenizer = TextTokenizer(Tokenizer.from_str(VOCABULARIES[name].to_str()), TokenizerConfig())
    pieces = VOCABULARIES[name].get_vocab(with_added_tokens=True)
    names = defaultdict(list)
    for piece, token_id in pieces.items():
        names[tokenizer.token_name(token_id)].append(piece)
    # The bytes of ASCII are characters, too, which have tokens of their own.
    shared = {each: found for each, found in names.items() if len(found) > 1}
    assert all(any(re.fullmatch("<0x[0-9A-F]{2}>", piece) for piece in found) for found in shared.values()), shared


def test_the_texts_and_names_of_tokens():
    pieces = sentence_piece()
    ids = {piece: pieces._tokenizer.token_to_id(piece) for piece in ("▁hello", "h", "<0xF0>", "<0x41>", "▁", EOS)}
    named = {piece: (pieces.token_name(each), pieces.token_text(each)) for piece, each in ids.items()}
    assert named == {
        "▁hello": (" hello", " hello"),
        "h": ("h", "h"),
        "<0xF0>": (r"\xf0", "\ufffd"),
        "<0x41>": ("A", "A"),
        "▁": (" ", " "),
        EOS: (EOS, EOS),
    }
