"""Members of JSON objects that come in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.partial_json import Member, MemberReader

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(*pieces: str) -> list[Member]:
    reader = MemberReader()
    return [member for piece in pieces for member in reader.read(piece)]


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.sampled_from([None, 1, "\t"]), st.booleans(), st.data())
def test_members_together_are_the_object(content: dict[str, Any], indent: Any, escaped: bool, data: st.DataObject):
    text = json.dumps(content, indent=indent, ensure_ascii=escaped)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    members = read(*pieces)
    assert members == read(*text) == read(text)
    assert [(json.loads(member.name), json.loads(member.value)) for member in members] == list(content.items())


def test_a_member_comes_with_the_last_character_of_its_value():
    reader, text = MemberReader(), '{"text": "a \\"b\\"", "list": [1, {"x": "]"}], "number": -1.5e3, "truth": true}'
    found = {member.name: end for end in range(len(text)) for member in reader.read(text[end])}
    after = {name: text.index(end) + len(end) - 1 for name, end in
             {'"text"': '\\""', '"list"': "}]", '"number"': "e3,", '"truth"': "true}"}.items()}  # fmt: skip
    assert found == after


@pytest.mark.parametrize("text", ["", "[1, 2]", '"{}"', "12", "{}", " {} ", "nonsense", '{"cut": "off'])
def test_a_text_without_a_whole_member_has_none(text: str):
    assert read(text) == read(*text) == []


def test_nothing_after_the_object_is_a_member():
    assert read('{"a": 1}, {"b": 2}') == [Member('"a"', "1")]
