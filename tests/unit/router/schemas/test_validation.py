"""Every member of every request body is named by its path when it is misspelled, missing, or of another type."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.fakes.router_service import PAYLOAD_LIMIT, RouterService
from tests.integration.router.filled_bodies import Member, Schemas
from tgi_server.router.api import documentation
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.admission import read_json
from tgi_server.router.api.app import create_app
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.base import Items, RequestModel
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.messages import MessagesRequest
from tgi_server.router.schemas.responses import ResponsesRequest
from tgi_server.router.schemas.validation import ignored, validate
from tgi_server.router.service import RequestPolicy

# JSON of each type, by the names of a schema.
VALUES = {"object": {}, "array": [], "string": "x", "integer": 5, "boolean": True}
# The members that tell the forms of a body apart.
FORMS = ("inputs", "messages", "prompt", "texts", "documents")
# The members that have a prompt: an empty one is refused when it is made.
PROMPTS = {"inputs", "messages", "prompt", "input"}
MOST_ITEMS = 10_000


@cache
def schemas() -> Schemas:
    """Returns the schemas that the server documents."""
    router = RouterService()
    router.threads.close()
    return Schemas(documentation.describe(create_app(router.service, AccessRules()).routes, "1.2.3"))


@cache
def members() -> list[tuple[type[BaseModel], Member]]:
    """Returns the members of all bodies, with the models of these; but those in objects that no request may have."""
    models = {name: model for module in vars(documentation).values() for name, model in vars_of(module)}
    bodies = {body["$ref"].rpartition("/")[2]: body for body in schemas().bodies.values()}
    found = [(models[name], member) for name, body in bodies.items() for member in schemas().members(body)]
    return [(model, member) for model, member in found if named(model, member.wrap(member.value)) is None]


def vars_of(module: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    if getattr(module, "__name__", "").startswith("tgi_server.router.schemas."):
        yield from ((name, each) for name, each in vars(module).items() if isinstance(each, type))


def named(model: type[BaseModel], body: Any) -> str | None:
    """Returns the path of the first member that is wrong, or else of the first that is ignored."""
    try:
        return next((each.path for each in ignored(validate(model, body), body)), None)
    except InvalidRequest as error:
        return error.param or ""


def changed(body: Any, member: Member, change: Any) -> Any:
    """Returns a body after `change` of the object that has the member, and the name that it has there."""
    target, *names = member.path.replace("[0]", ".0").split(".")
    parent = body
    for name in (target, *names)[:-1]:
        parent = parent[int(name) if name.isdigit() else name]
    change(parent, (target, *names)[-1])
    return body


def named_without(member: Member) -> set[str]:
    """Returns the paths of which one may be named where a required member is missing."""
    parent, _, name = member.path.rpartition(".")
    if name in FORMS:  # the object has none of the members that tell its form
        return {member.path, parent}
    # An object without a type, of which none of the possible members has the fields.
    return {member.path, f"{parent}.type"} if name == "id" else {member.path}


def chooses(member: Member) -> bool:
    """Returns True for the type of an object: without it the object is another one, if not a wrong one."""
    return member.path.endswith(".type")


def test_a_misspelled_member_is_named():
    def misspell(parent: Any, name: str) -> None:
        parent[f"{name}z"] = parent.pop(name)

    wrong = []
    for model, member in members():
        path = named(model, changed(member.wrap(member.value), member, misspell))
        near = path is not None and chooses(member) and path.startswith(member.path.removesuffix("type"))
        if not near and path not in (named_without(member) if member.required else {f"{member.path}z"}):
            wrong.append((model.__name__, member.path, path))
    assert not wrong
    assert len(members()) > 1500


def test_a_member_that_is_missing_is_named():
    def drop(parent: Any, name: str) -> None:
        del parent[name]

    wrong = []
    for model, member in members():
        path = named(model, changed(member.wrap(member.value), member, drop))
        if not chooses(member) and path not in (named_without(member) if member.required else {None}):
            wrong.append((model.__name__, member.path, path))
    assert not wrong


def test_a_member_of_another_type_is_named():
    wrong = []
    bent = 0
    for model, member in members():
        types = {"integer" if each.get("type") == "number" else each.get("type") for each in member.schemas}
        others = [] if None in types else [value for kind, value in VALUES.items() if kind not in types]
        bent += len(others)
        paths = [named(model, member.wrap(value)) for value in others]
        wrong += [(model.__name__, member.path, path) for path in paths if path != member.path]
    assert not wrong
    assert bent > 5000


def beyond(schema: Any, item: Any) -> Iterator[Any]:
    """Yields values that break a bound of a schema, in OpenAPI's words. item: of its lists and objects."""
    if "minimum" in schema:
        yield schema["minimum"] - (not schema.get("exclusiveMinimum"))
    if "maximum" in schema:
        yield schema["maximum"] + (not schema.get("exclusiveMaximum"))
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if schema.get("maxItems", MOST_ITEMS + 1) <= MOST_ITEMS:
        yield [item] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield {f"{index}": item for index in range(schema["maxProperties"] + 1)}
    for keyword, empty in (("minLength", ""), ("minItems", []), ("minProperties", {})):
        if schema.get(keyword):
            yield empty


def test_a_member_out_of_its_bounds_is_named():
    wrong = []
    tried = 0
    for model, member in members():
        for schema in member.schemas:
            inner = schema.get("items") or schema.get("additionalProperties")
            item = schemas().sample(inner) if isinstance(inner, dict) else 0
            values = [value for value in beyond(schema, item) if value or member.path.split(".")[-1] not in PROMPTS]
            paths = [named(model, member.wrap(value)) for value in values]
            tried += len(values)
            wrong += [(model.__name__, member.path, path) for path in paths if path != member.path]
    assert not wrong
    assert tried > 900


async def test_an_empty_prompt_is_named():
    async with RouterService().client() as client:
        for path, schema in schemas().bodies.items():
            for name in (PROMPTS - {"input"}) & schemas().sample(schema).keys():
                for empty in ("", []):
                    response = await client.post(path, json={**schemas().sample(schema), name: empty})
                    told = response.json()["error"]
                    named_by = [f"`{name}`" in str(told), isinstance(told, dict) and told.get("param") == name]
                    assert response.status_code in (400, 404, 422), (path, response.text)
                    assert response.status_code == 404 or any(named_by), (path, response.text)


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (
            ChatRequest,
            {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "`tools[0].function.paramters` is not a field of this request; "
            "did you mean `tools[0].function.parameters`?",
        ),
        (
            MessagesRequest,
            {"messages": [], "max_tokens": 5, "tools": [{"name": "f", "input_shema": {}}]},
            "`tools[0].input_shema` is not a field of this request; did you mean `tools[0].input_schema`?",
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "tex": "a"}]}]},
            "`input[0].content[0].text`: Field required, not `tex`",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "txt", "text": "a"}]}]},
            "`messages[0].content[0].type` must be `text`, `image_url` or `refusal`",
        ),
        (ResponsesRequest, {"input": 3}, "`input` must be a string or a list"),
        (ResponsesRequest, {"input": [{"content": "a"}]}, "`input[0].role`: Field required"),
        (ResponsesRequest, {"input": [{"text": "a"}]}, "`input[0].type`: Field required"),
    ],
)
def test_what_a_refusal_says(model: type[BaseModel], body: Any, message: str):
    try:
        (told,) = (f"`{each.path}` {each.fault}" for each in ignored(validate(model, body), body))
    except InvalidRequest as error:
        told = str(error)
    assert told == message


def test_free_json_is_not_looked_into():
    free = {"anything": {"at": "all"}}
    call = {"id": "a", "function": {"name": "f", "arguments": free}}
    body = {
        "messages": [{"role": "assistant", "tool_calls": [call], "annotations": [free]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": free}}],
        "metadata": free,
        "chat_template_kwargs": free,
        "documents": [free],
        "response_format": {"type": "json_object", "schema": free},
        "unknown": None,
    }
    assert named(ChatRequest, body) is None


@pytest.mark.parametrize("strict", [True, False])
async def test_every_route_refuses_unknown_members_on_demand_and_names_them_otherwise(strict: bool, tmp_path: Path):
    policy = RequestPolicy(PAYLOAD_LIMIT, 1, 10, strict_fields=strict, adapter_root=tmp_path)
    async with RouterService(policy=policy).client() as client:
        for path, schema in schemas().bodies.items():
            body = {**schemas().sample(schema), "misspelled": 1}
            if strict and path != "/vertex":  # whose instances have no sample
                response = await client.post(path, json=body)
                assert response.status_code in (400, 422), response.text
                assert "`misspelled` is not a field of this request" in response.text
            elif path.endswith(("tokenize", "count_tokens")):
                response = await client.post(path, json=body)
                assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "misspelled")


class Order(RequestModel):
    name: str
    number: int = Field(ge=1, le=5)
    parts: Items[int] = []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[]", "the request: Input should be an object"),
        (b'{"number": 1}', "`name`: Field required"),
        (b'{"name": "a", "number": 9}', "`number` is 9; it must be at most 5"),
        (b'{"name": "a", "number": 0}', "`number` is 0; it must be at least 1"),
        (b'{"name": 1, "number": "2"}', "`name`: Input should be a valid string; `number`: Input should be a valid "),
        (b'{"name": "a", "number": 1, "parts": [1, "x", "y"]}', "`parts[1]`: Input should be a valid integer"),
    ],
)
def test_each_fault_of_a_body_is_told_by_the_field_and_the_bound(body: bytes, told: str):
    with pytest.raises(InvalidRequest) as refusal:
        validate(Order, read_json(body))
    assert str(refusal.value).startswith(told)


def test_a_long_number_is_cut_and_texts_of_the_client_are_not_repeated():
    with pytest.raises(InvalidRequest) as refusal:
        validate(Order, read_json(b'{"name": ["secret"], "number": ' + b"9" * 1000 + b"}"))
    told = str(refusal.value)
    assert "secret" not in told
    assert len(told) < 200


def test_of_very_many_faults_the_first_ones_are_told():
    class Many(RequestModel):
        parts: list[Order]

    with pytest.raises(InvalidRequest) as refusal:
        validate(Many, read_json(b'{"parts": [' + b",".join([b"{}"] * 50) + b"]}"))
    assert str(refusal.value).count("Field required") == 10
    assert str(refusal.value).endswith("; and more")
