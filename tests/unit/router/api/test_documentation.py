"""The OpenAPI document names everything that TGI's names."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from tests.fakes.router_service import RouterService
from tests.unit.router.api.tgi_names import ROUTES, SCHEMAS
from tgi_server.router.api import documentation
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.app import create_app


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return documentation.describe(create_app(RouterService().service, AccessRules()).routes, "1.2.3")


def fields(document: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Returns the fields of an object; of a union, those of all its members."""
    found = set(schema.get("properties", {}))
    for member in (member for kind in ("allOf", "oneOf", "anyOf") for member in schema.get(kind, [])):
        name = member.get("$ref", "").rsplit("/", 1)[-1]
        found |= fields(document, document["components"]["schemas"][name] if name else member)
    return found


def test_every_route(document: dict[str, Any]):
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} >= ROUTES


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema(document: dict[str, Any], name: str):
    schemas = document["components"]["schemas"]
    assert name in schemas
    assert fields(document, schemas[name]) >= SCHEMAS[name]


def test_every_reference_leads_somewhere(document: dict[str, Any]):
    def references(node: Any) -> list[str]:
        if isinstance(node, list):
            return [found for each in node for found in references(each)]
        if not isinstance(node, dict):
            return []
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for each in node.values() for found in references(each)]

    found = references(document)
    assert found
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_errors_are_json_or_events(document: dict[str, Any]):
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    errors = [error for each in operations for status, error in each["responses"].items() if int(status) >= 400]
    kinds = {kind for error in errors for kind in error.get("content", {})}
    assert kinds == {"application/json", "text/event-stream"}


def test_the_document_is_openapi_3_0(document: dict[str, Any]):
    def check(node: Any) -> None:
        if isinstance(node, list):
            for each in node:
                check(each)
        elif isinstance(node, dict):
            assert node.get("type") != "null"
            assert "const" not in node
            for each in node.values():
                check(each)

    assert document["openapi"] == "3.0.3"
    assert document["info"]["version"] == "1.2.3"
    check(document)
    schemas = document["components"]["schemas"]
    temperature = schemas["GenerateParameters"]["properties"]["temperature"]
    assert (temperature["type"], temperature["nullable"]) == ("number", True)
    assert (temperature["minimum"], temperature["exclusiveMinimum"]) == (0, True)
    assert schemas["JsonGrammar"]["properties"]["type"]["enum"] == ["json", "json_object"]


async def test_the_document_is_made_once_and_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    app = create_app(RouterService().service, AccessRules())
    threads: list[int] = []

    def make(*_: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {"openapi": "3.0.3"}

    monkeypatch.setattr(documentation, "describe", make)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answers = await asyncio.gather(*(client.get(path) for path in ("/openapi.json", "/api-doc/openapi.json") * 2))
    assert {answer.text for answer in answers} == {'{"openapi":"3.0.3"}'}
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
