"""`x-lark`: Lark grammars of texts inside JSON strings."""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.grammars import demo_compiler
from tests.unit.grammar.acceptance import accepts
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import InvalidGrammar
from tgi_server.grammar.json_lark import json_lark

PATCH = """\
// Edits of files.
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: addition | removal | update
addition: "*** Add File: " path LF added+
removal: "*** Delete File: " path LF
update: "*** Update File: " path LF moved? changes?
path: /(.+)/
added: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
changes: (heading | changed)+ last?
heading: ("@@" | "@@ " /(.+)/) LF
changed: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
SUM = """\
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)*
factor: INT | "(" expr ")"
SP: " "
ADD: "+" | "-"
MUL: "*"
%import common.INT
"""
VALUES = """\
start: value
?value: list | table | ESCAPED_STRING | SIGNED_NUMBER | "true"i
list: "[" [value ("," value)*] "]"
table: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
%import common (ESCAPED_STRING, WS)
%import common.SIGNED_NUMBER
%ignore WS
"""
ODD = r"""
start: quoted | coded | /./ "\t" | /[^\n]+/ "!" | /.\x22/s | "\"\\\/é\u00e9\x41" | "a".."f" HEX ~ 2..5 | quiet
quiet: ["ß"i] /(?i:ÉX)+\p{Greek}?/
quoted: "\"" /[^"\\\x00-\x1f]/* "\""
coded: /[\x00-\x08]{2,3}/ | /[[:cntrl:]&&[^\x7f]]\d\s/ | ("(" LINE? ")")
LINE: /[a-z"]*/ & ~/(.|\n)*xx(.|\n)*/
HEX: /[0-9a-f]/i
"""
# As one terminal, since llguidance takes the longest one of several, whatever follows.
ODD_TERMINAL = "start: START\n" + ODD.replace("start", "START").replace("quoted", "QUOTED").replace(
    "coded", "CODED"
).replace("quiet", "QUIET")
NESTED = r"""
start: item
item: "(" (item | WORD | TEXT | NOTE)* ")"
WORD: /[a-z]+/
TEXT: /"([^"\\]|\\["\\n])*"/
NOTE: ";" /[^\n]*/ "\n"
"""


def in_json(lark: str) -> str:
    name, lines = json_lark(lark, "text")
    return "\n".join(["%llguidance {}", f'start: "\\"" {name} "\\""', *lines])


def matches(lark: str, text: str) -> bool:
    lookup = demo_compiler().tokenizer.lookup
    matcher = LLMatcher(lookup, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = lookup.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def fits(lark: str, text: str) -> bool:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "x-lark": lark}))
    return accepts(demo_compiler(), grammar, json.dumps(text, ensure_ascii=False))


def fault(lark: Any) -> str:
    with pytest.raises(InvalidGrammar) as refusal:
        demo_compiler().check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "x-lark": lark})))
    return str(refusal.value)


UPDATE = '*** Begin Patch\n*** Update File: a "b"\\c.py\n@@ def f():\n-\tx = "\\n"\n+\tx = \'é\x01\'\n \n*** End Patch'


@pytest.mark.parametrize(
    ("lark", "text", "accepted"),
    [
        (PATCH, UPDATE, True),
        (PATCH, UPDATE + "\n", True),
        (PATCH, UPDATE.replace("@@ def", "@def"), False),
        (PATCH, UPDATE.replace("\n", "\r\n"), False),
        (PATCH, '*** Begin Patch\n*** Add File: "x"\n+"\\"\n+\n*** Delete File: y\n*** End Patch', True),
        (PATCH, "*** Begin Patch\n*** Add File: x\n*** End Patch\n", False),
        (SUM, "(1 + 20) * 3 - 4", True),
        (SUM, "1 +", False),
        (SUM, "((1))", True),
        (SUM, "((1)", False),
        (VALUES, '[1, "a\\"b\\n", {"k" :\n\t"v"}, TRUE]', True),
        (VALUES, '{"a"\r\n: ["" , -2]}', True),
        (VALUES, "[1,]", False),
        (VALUES, '"a', False),
        (NESTED, '(a("b\\n"; "c" \\ (\n(x)))', True),
        (NESTED, '("b\n")', True),
        (NESTED, '(; c"\n\n)', False),
        (ODD, '"abc"', True),
        (ODD, '"a\\b"', False),
        (ODD, "\\\t", True),
        (ODD, '"\\!', True),
        (ODD, '\n"', True),
        (ODD, "\n\t", False),
        (ODD, '"\\/ééA', True),
        (ODD, "c09Af", True),
        (ODD, "g09", False),
        (ODD, "c0", False),
        (ODD, "SSéxÉXλ", False),
        (ODD, "ßéxÉXλ", True),
        (ODD, "\x00\x08", True),
        (ODD, "\x00\x0b", False),
        (ODD, "\x1f7\n", True),
        (ODD, '(a"x)', True),
        (ODD, "(axxa)", False),
    ],
)
def test_a_text_in_a_string(lark: str, text: str, accepted: bool) -> None:
    assert fits(lark, text) is accepted


def near(*texts: str) -> st.SearchStrategy[str]:
    """Pieces of texts, and characters that JSON escapes, in any order; and the texts with one of them."""
    pieces = st.sampled_from([*'"\\\n\t\x01 é(),;', *(piece for text in texts for piece in text.split("\n"))])
    changed = st.builds(
        lambda text, place, piece: text[: place % (len(text) + 1)] + piece + text[place % (len(text) + 1) :],
        st.sampled_from(texts),
        st.integers(0, 200),
        pieces,
    )
    return st.one_of(st.lists(pieces, max_size=5).map("".join), changed)


@pytest.mark.parametrize(
    ("lark", "same", "texts"),
    [
        (PATCH, PATCH, near(UPDATE, UPDATE + "\n")),
        (SUM, SUM, near("(1 + 20) * 3 - 4", "((1))")),
        (NESTED, NESTED, near('(a("b\\n"; "c" \\ (\n(x)))', "(())")),
        (ODD, ODD_TERMINAL, near('"abc"', "\\\t", "c09af", "\x00\x08", '(a"x)', "ßéxÉXλ")),
    ],
    ids=["patch", "sum", "nested", "odd"],
)
def test_the_same_texts_as_outside_of_json(lark: str, same: str, texts: st.SearchStrategy[str]) -> None:
    inside = in_json(lark)

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        assert matches(inside, json.dumps(text, ensure_ascii=False)) is matches(same, text)

    check()


ATOMS = [
    "a",
    "b",
    '"',
    r"\\",
    r"\n",
    r"\x41",
    r"\t",
    ".",
    "[^a]",
    '[^\\n"]',
    r"[\s\w]",
    r"\S",
    r"[\x00-b]",
    "é",
    r"\d",
    "/",
]
SPECIAL = 'ab"\\\n\tA é\x01/'


def expressions() -> st.SearchStrategy[str]:
    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}", "{1,}"])).map(
                lambda two: f"({two[0]}){two[1]}"
            ),
            inner.map(lambda each: f"(?is:{each})"),
        )

    return st.recursive(st.sampled_from(ATOMS), more, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(expressions(), st.lists(st.text(SPECIAL, max_size=4), min_size=3, max_size=3))
def test_any_regular_expression(expression: str, texts: list[str]) -> None:
    """Alone it is one terminal, which is exact. In a grammar with recursion nothing else may match."""
    pattern = expression.replace("/", r"\/")
    alone, nested = f"start: /{pattern}/", f'start: "<" start ">" | TEXT\nTEXT: /{pattern}/'
    inside = in_json(alone)
    try:
        pieces = in_json(nested)
    except InvalidGrammar as error:
        assert "recursive" in str(error)  # noqa: PT017
        pieces = None
    for text in texts:
        accepted = matches(alone, text)
        assert matches(inside, json.dumps(text, ensure_ascii=False)) is accepted
        if pieces is not None and matches(pieces, json.dumps(f"<{text}>", ensure_ascii=False)):
            assert accepted or matches(alone, f"<{text}>")


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ("start: a", "a"),
        ('begin: "a"', "start"),
        ("start: /a(?=b)/", "look-around"),
        (r"start: /\ba/", "lookaround"),
        ("start: /a*?/", "lazy repetitions are not supported (*?)"),
        ("start: /^a/", "anchors are not supported (^)"),
        ("start: /a b/x", "the flag x"),
        (r"start: /(a)\1/", "backreferences"),
        ('start: A\nA.2: "a"', "priority"),
        ('start: list{"a"}\nlist{x}: x+', "params"),
        ("start: NAME\n%import python.NAME", "python.NAME"),
        ("start: A\n%declare A", "declare"),
        ('start: %json {"type": "string"}', "%json"),
        ("start: @other", "@other"),
        ("start: <|end|>", "<|end|>"),
        ("start: <[1]>", "<[1]>"),
        ('start[lazy]: "a"', "start"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ("start: 'a'", "lexer error"),
        ('start: "(" start ")" | /[^x]{2,9}/', "{2,9}"),
        ('start: "(" start ")" | A\nA: /.*/ & ~/x/', "& on texts"),
        (3, "must be a grammar"),
        ("", "mpty"),
    ],
)
def test_what_is_not_supported_is_named(lark: Any, reason: str) -> None:
    message = fault(lark)
    assert reason in message
    assert "#" in message


def test_what_cannot_be_combined() -> None:
    schema = {"type": "string", "x-lark": 'start: "a"', "maxLength": 3}
    with pytest.raises(InvalidGrammar, match="'maxLength'"):
        demo_compiler().check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_escapes_are_those_of_json() -> None:
    for character in [*map(chr, range(0x20)), *string.printable, "\x7f", "\u2028"]:
        text = json.dumps(character, ensure_ascii=False)
        assert matches(in_json(r"start: /(.|\n)/"), text), text
        assert not matches(in_json(r"start: /[^\x00-\x{10ffff}]/"), text)
