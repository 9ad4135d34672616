"""The form of a text is asked for in TGI's way and in OpenAI's."""

from typing import Any

import pytest
from pydantic import ValidationError

from tgi_server.router.schemas.grammar import (
    GrammarType,
    JsonGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    PlainText,
    RegexGrammar,
)

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"type": "json", "value": SCHEMA}, JsonGrammar),
        ({"type": "json_object"}, JsonGrammar),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, JsonSchemaGrammar),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, JsonSchemaGrammar),
        ({"type": "regex", "value": "a+"}, RegexGrammar),
        ({"type": "lark", "value": 'start: "a"'}, LarkGrammar),
        ({"type": "text"}, PlainText),
    ],
)
def test_the_type_tells_the_forms_apart(value: dict[str, Any], kind: type):
    assert isinstance(GrammarType.model_validate(value).root, kind)


def test_a_schema_keeps_its_name_in_both_forms():
    forms = [{"type": "json_schema", member: {"schema": SCHEMA}} for member in ("value", "json_schema")]
    tgi, openai = (GrammarType.model_validate(form).root for form in forms)
    assert isinstance(tgi, JsonSchemaGrammar)
    assert isinstance(openai, JsonSchemaGrammar)
    assert tgi.value == openai.json_schema
    assert tgi.value is not None
    assert tgi.value.definition == SCHEMA


@pytest.mark.parametrize("value", [{"type": "yaml", "value": "a"}, {"value": "a"}, {"type": "regex"}, "a+"])
def test_an_unknown_form_is_refused(value: Any):
    with pytest.raises(ValidationError):
        GrammarType.model_validate(value)
