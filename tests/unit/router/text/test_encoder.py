"""Texts of embedding and rerank models become tokens once, and reach the shards in pieces."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tgi_server import demo_model
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.text import encoder as module
from tgi_server.router.text.encoder import Fitting, ServedEncoder
from tgi_server.router.text.tokenizer import TokenizerThreads, load_tokenizer, tokenizer_of
from tgi_server.router.text.tokenizer_config import TokenizerConfig

CUT = Fitting("documents", cut=True)
MOST_TOKENS = 512


class Shards:
    """Answers with a row for each text: its number of tokens."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        lengths = [len(each.ids) for each in request.inputs]
        self.sizes.append(sum(lengths))
        return pb.EncodeResponse(values=struct.pack(f"<{len(lengths)}f", *lengths), columns=1)


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    made = TokenizerThreads(load_tokenizer(demo_model.PATH, TokenizerConfig()), 2)
    yield made
    made.close()


def served(threads: TokenizerThreads, shards: Shards, **info: Any) -> ServedEncoder:
    message = pb.Encoder(folder=str(demo_model.PATH), max_tokens=MOST_TOKENS, columns=1, **info)
    return ServedEncoder("encoder", message, shards, threads, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "document", ["rice", "", " two  blanks", "\nlines\n", "12 apples", "ärger", "<|im_end|>", "日本"]
)
async def test_a_query_is_read_once_and_gives_the_tokens_of_the_whole_text(threads: TokenizerThreads, document: str):
    ranker = served(threads, Shards(), task="rank", answers=True)
    (given, again) = await ranker.of_pairs([("How long\n", document), ("How long\n", "oak")], CUT, instruction="Find")
    plain = tokenizer_of(demo_model.PATH)
    plain.encode_special_tokens = True
    text = f"<Instruct>: Find\n<Query>: How long\n\n<Document>: {document}"
    whole = plain.encode(text, add_special_tokens=False).ids
    assert list(given.ids)[-len(whole) - len(_after()) : -len(_after())] == whole
    assert given.ids != again.ids


def _after() -> list[int]:
    ids: list[int] = tokenizer_of(demo_model.PATH).encode(module._AFTER, add_special_tokens=False).ids
    return ids


async def test_a_query_that_leaves_no_room_is_refused_before_it_is_repeated(
    threads: TokenizerThreads, monkeypatch: pytest.MonkeyPatch
):
    ranker = served(threads, Shards(), task="rank", answers=True)
    characters: list[int] = []
    pieces = module._pieces
    monkeypatch.setattr(
        module, "_pieces", lambda texts, *rest: pieces((characters.append(len(each)) or each for each in texts), *rest)
    )
    with pytest.raises(InvalidRequest, match=r"`query` has \d+ tokens; the model reads at most 512") as refused:
        await ranker.of_pairs([("rice " * 40_000, "oak")] * 2_048, CUT)
    assert refused.value.param == "query"
    assert sum(characters) < 2 * 200_000


async def test_many_texts_are_sent_in_pieces_that_others_come_between(threads: TokenizerThreads):
    embedder = served(threads, shards := Shards(), task="embed")
    inputs = await embedder.of_texts(["rice " * 100] * 1_500, Fitting("input"))
    values = await embedder.values(inputs)
    assert len(shards.sizes) > 1
    assert max(shards.sizes) <= 65_536
    assert [row[0] for row in values.numbers()] == [len(each.ids) for each in inputs]
