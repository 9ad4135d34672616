"""The corpus that the demo model is trained on."""

from itertools import islice
from random import Random

import pytest

from tools.demo_model.corpus import SOURCES, Split, documents, draw, held_out
from tools.demo_model.exchange import Exchange, agreement, article, vary
from tools.demo_model.layout import Document, Piece


def first(count: int, seed: int, split: Split = Split.TRAINING) -> list[Document]:
    return list(islice(documents(seed, split), count))


def test_the_seed_alone_decides_the_documents() -> None:
    assert first(200, seed=3) == first(200, seed=3)
    assert first(200, seed=3) != first(200, seed=4)
    assert first(50, seed=3) != first(50, seed=3, split=Split.HELD_OUT)


def test_held_out_requests_are_a_small_part_and_never_drawn_for_training() -> None:
    rng = Random(0)
    drawn = [source.make(rng) for source in SOURCES for _ in range(50)]
    assert 0.02 < sum(map(held_out, drawn)) / len(drawn) < 0.09
    closed = {source.make for source in SOURCES if source.closed}
    assert closed
    open_requests = [source.make(rng) for source in SOURCES if not source.closed for _ in range(100)]
    out = {exchange.request for exchange in open_requests if held_out(exchange) and not exchange.context}
    assert out
    trained = {draw(rng, Split.TRAINING).request for _ in range(5000)}
    assert not out & trained


def test_every_held_out_exchange_is_held_out() -> None:
    rng = Random(1)
    assert all(held_out(draw(rng, Split.HELD_OUT)) for _ in range(200))


def test_letter_case_and_punctuation_do_not_carry_a_request_over_the_split() -> None:
    for number in range(200):
        asked = f"How do I cook dish {number}"
        assert held_out(Exchange(f"{asked}?", "a")) == held_out(Exchange(asked.lower(), "b"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.make.__module__}.{source.make.__name__}")
def test_every_source_makes_whole_sentences(source: object) -> None:
    rng = Random(2)
    for _ in range(100):
        exchange = source.make(rng)
        for text in (exchange.request, exchange.answer, exchange.context):
            assert text == text.strip()
            assert "  " not in text
            assert ".." not in text.replace("...", "")
            assert not set("[]") & set(text) or text.startswith(("{", "Which ingredient", "Describe", "Give me"))
        assert exchange.request
        assert exchange.answer


def test_each_document_ends_with_the_end_token_and_has_something_to_learn() -> None:
    for document in first(300, seed=5):
        assert document[-1].text.endswith("<|eos|>")
        assert any(piece.learned for piece in document)
        assert document[0] == Piece(document[0].text, learned=False)
        assert document[0].text.startswith("<|bos|>")


def test_wording_agrees_with_the_noun() -> None:
    assert agreement("eggs")["be"] == "are"
    assert agreement("asparagus")["be"] == "is"
    assert [article(name) for name in ("oven", "hammer", "pair of pliers", "utility knife", "nails")] == [
        "an oven",
        "a hammer",
        "a pair of pliers",
        "a utility knife",
        "nails",
    ]
    assert vary(Random(0), "[{x}|{x}] is here.", x="the pan") == "The pan is here."
