"""Grammars: the form that clients ask a text to have, as the shards compile it."""

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
# The place of all of a JSON schema.
WHOLE_SCHEMA = "#"


def requested_grammar(requested: schemas.GrammarType | None, place: str = "response_format") -> Grammar | None:
    """Returns the grammar of the field at `place`; None when any text will do.

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
    """Returns the grammar of JSON that fits `schema`: an object, a boolean, or a string of JSON that is one of them.

    lenient: places in it below which constraints that cannot be enforced are left to the model. strict: the schema is
    read by the letter of JSON Schema; otherwise objects that it does not open are closed. place: of the schema in the
    request.
    """
    if isinstance(schema, str):
        try:
            schema = from_json(schema)  # which bounds how deep it may nest
        except ValueError as error:
            raise InvalidRequest(f"the JSON schema of the grammar is not JSON: {error}", param=place) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("the JSON schema of a grammar must be an object", param=place)
    read = schema if strict else with_closed_objects(schema)
    text = json.dumps(read)
    reading = JSON_SCHEMA if strict else CLOSED_OBJECTS
    return Grammar(GrammarKind.JSON_SCHEMA, text, lenient=lenient, reading=reading, place=place)


def token_grammar(token_ids: Collection[int], end_tokens: Collection[int]) -> Grammar:
    """Returns the grammar of texts of these tokens. They end only if a token that ends a text is among them."""
    shown = sorted(set(token_ids) - set(end_tokens))
    may_end = len(shown) < len(set(token_ids))
    any_token = f"<[{','.join(map(str, shown))}]>" if shown else '""'
    # Without `no_forcing`, one token that never ends would be forced for ever.
    repeated = "*" if may_end else " start"
    return Grammar(GrammarKind.LARK, f'%llguidance {{"no_forcing": true}}\nstart: {any_token}{repeated}\n')


def with_text(grammar: Grammar, text: str) -> Grammar:
    """Returns a copy of the grammar, with the text that its spans are taken from.

    One without spans is the same for every text.
    """
    wants_text = grammar.type is GrammarKind.JSON_SCHEMA and _SPAN in grammar.value
    return replace(grammar, text=text if wants_text else "")
