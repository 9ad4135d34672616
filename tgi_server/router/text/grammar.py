"""Converts the grammars of requests to the form that the shards compile."""

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.answers.schema_reading import CLOSED_OBJECTS, JSON_SCHEMA, with_closed_objects
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas import grammar as schemas

ANY_OBJECT = {"type": "object"}
_SPAN = '"x-span"'
# JSON pointer of a whole JSON schema.
WHOLE_SCHEMA = "#"


def requested_grammar(requested: schemas.GrammarType | None, place: str = "response_format") -> Grammar | None:
    """Returns the grammar of the request's field `place`; None if any text is allowed.

    Raises InvalidRequest for an invalid JSON schema.
    """
    if requested is None:
        return None
    match requested.root:
        case schemas.PlainText():
            return None
        case schemas.RegexGrammar(value=regex):
            return Grammar(GrammarKind.REGEX, regex, place=place)
        case schemas.LarkGrammar(value=lark):
            return Grammar(GrammarKind.LARK, lark, place=place)
        case schemas.JsonGrammar(value=value):
            return json_grammar(ANY_OBJECT if value is None else value, place=f"{place}.value")
        case schemas.JsonSchemaGrammar(value=value, json_schema=json_schema):
            config = value or json_schema
            if config is None:
                raise InvalidRequest.at(f"{place}.json_schema", "is missing, and so is `value`")
            strict = value is not None if config.strict is None else config.strict
            lenient = () if strict else (WHOLE_SCHEMA,)
            return json_grammar(config.definition, lenient, strict=config.strict is True, place=place)


def json_grammar(schema: Any, lenient: tuple[str, ...] = (), *, strict: bool = False, place: str = "") -> Grammar:
    """Returns the grammar of JSON that fits `schema`, which may be an object, a boolean, or a string of such JSON.

    lenient: places in it below which constraints that cannot be enforced are left to the model. strict: True reads the
    schema by the letter of JSON Schema; False allows additional properties only where the schema says so. place: the
    field of the request, for errors. Raises InvalidRequest.
    """
    if isinstance(schema, str):
        try:
            schema = from_json(schema)  # it limits the depth of nesting
        except ValueError as error:
            raise InvalidRequest(f"the JSON schema of the grammar is not JSON: {error}", param=place) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("the JSON schema of a grammar must be an object", param=place)
    read = schema if strict else with_closed_objects(schema)
    text = json.dumps(read)
    reading = JSON_SCHEMA if strict else CLOSED_OBJECTS
    return Grammar(GrammarKind.JSON_SCHEMA, text, lenient=lenient, reading=reading, place=place)


def token_grammar(token_ids: Collection[int], end_tokens: Collection[int]) -> Grammar:
    """Returns the grammar of texts that consist of these tokens. They end only if an end token is among them."""
    shown = sorted(set(token_ids) - set(end_tokens))
    may_end = len(shown) < len(set(token_ids))
    any_token = f"<[{','.join(map(str, shown))}]>" if shown else '""'
    # Without `no_forcing`, a single token without an end token would be a jump-forward token for ever.
    repeated = "*" if may_end else " start"
    return Grammar(GrammarKind.LARK, f'%llguidance {{"no_forcing": true}}\nstart: {any_token}{repeated}\n')


def with_text(grammar: Grammar, text: str) -> Grammar:
    """Returns a copy of the grammar with `text` as the source of its spans; without spans, with no text."""
    wants_text = grammar.type is GrammarKind.JSON_SCHEMA and _SPAN in grammar.value
    return replace(grammar, text=text if wants_text else "")
