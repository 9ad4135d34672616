"""Regular expressions mean what Python's `re.fullmatch` makes of them, or are refused."""

import re

import pytest

from tests.grammars import demo_compiler
from tests.unit.grammar.acceptance import accepts
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import InvalidGrammar

TEXTS = [
    *(
        "",
        "a",
        "b",
        "ab",
        "aab",
        "abab",
        "A",
        "AB",
        "1",
        "12",
        " ",
        "\n",
        "a\nb",
        "é",
        "²",
        "_",
        "-",
        "a-b",
        "[",
        "]",
        "&&",
    ),
    *("x.y", "^a", "a$", "\x1c", "\u017f", "\u0661", "\u00a0", "\\", "/", '"', "(", "ß"),
]


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "a|b",
            "^a$",
            "^a$|^b$",
            "(^ab$)",
            "(?:ab)+",
            "a*b?",
            "a{2}b",
            "a{1,}b",
            "[ab]+",
            "[^a]",
            "[^a]*",
            ".",
            ".*",
            "(?s).*",
        ),
        *(
            r"\d+",
            r"\D",
            r"\w+",
            r"\W",
            r"\s",
            r"\S+",
            r"[\w-]+",
            r"[^\w]",
            r"[^\W]",
            r"[^\s\d]+",
            r"[\D]",
            r"[]a]",
            "[[&]+",
        ),
        *(
            "(?i)ab",
            "(?i:a)b",
            "(?P<name>a)b",
            r"\x61",
            "\\u00e9",
            r"\.",
            r"x\.y",
            r"\^a",
            r"a\$",
            "a+?b",
            "(a|)b",
            "[a-c]{0,4}",
        ),
        *("", r"\\", "/", '"', r"\(", r"(?x) a  b # c", r"\A a \Z".replace(" ", ""), "é|ß", "(?a)\\w"),
    ],
)
def test_texts_match_only_if_python_says_so(pattern: str) -> None:
    grammar = Grammar(GrammarKind.REGEX, pattern)
    for text in TEXTS:
        accepted, matches = accepts(demo_compiler(), grammar, text), re.fullmatch(pattern, text) is not None
        assert matches or not accepted, f"{text!r} is accepted"
        if text.isascii() and text.isprintable():
            assert accepted == matches, f"{text!r} is not accepted"


def test_what_rust_knows_and_python_does_not() -> None:
    greek = Grammar(GrammarKind.REGEX, r"\p{Greek}+")
    assert accepts(demo_compiler(), greek, "αβγ")
    assert not accepts(demo_compiler(), greek, "abc")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "the regular expression cannot be read"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-references"),
        (r"\bab", "anchors"),
        ("a^b", "anchors"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("(?m)^a$", "flags"),
        ("(?L)a", "expression cannot be read"),
        ("\ud800", "surrogates"),
    ],
)
def test_an_expression_that_cannot_be_matched_token_by_token_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        demo_compiler().check(Grammar(GrammarKind.REGEX, pattern))
