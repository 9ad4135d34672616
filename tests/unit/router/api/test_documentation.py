"""The OpenAPI document names everything that TGI's names."""

from typing import Any

import pytest

from tests.fakes.vocabularies import CONFIG, byte_level
from tests.grammars import no_fault
from tests.unit.router.api.tgi_names import ROUTES, SCHEMAS
from tests.unit.router.text.test_parameters import LIMITS, VOCAB_SIZE
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.app import create_app
from tgi_server.router.metrics import Metrics
from tgi_server.router.request import ValidRequest
from tgi_server.router.service import Capacity, ModelDescription, Service
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.tokenizer import TokenizerThreads
from tgi_server.router.text.tool_formats import TGI_FORMAT
from tgi_server.router.text.tools import AnswerForm
from tgi_server.router.text.validation import Validator
from tgi_server.router.tracing import RequestTracer


class Nobody:
    """No request is ever made here."""

    def submit(self, request: ValidRequest) -> None:
        raise AssertionError

    def cancel(self, request_id: int) -> None:
        raise AssertionError


async def well() -> None:
    """The shards are."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    threads = TokenizerThreads(byte_level(), 1)
    service = Service(
        model=ModelDescription("model", ["model"], None, "cpu", encoder_decoder=False, version="1.2.3"),
        limits=LIMITS,
        tokenizer=threads.tokenizer,
        threads=threads,
        template=ChatTemplate(CONFIG),
        validator=Validator(LIMITS, threads, VOCAB_SIZE, None, no_fault),
        submitter=Nobody(),
        capacity=Capacity(1),
        metrics=Metrics(),
        tracer=RequestTracer(enabled=False),
        check_health=well,
        payload_limit=1000,
        validation_workers=1,
        special_tokens=None,
        answer_form=AnswerForm(TGI_FORMAT, None, {}),
        max_stored_responses=1,
        openai_limits=LIMITS.of_openai(),
        sampling_defaults={},
    )
    return create_app(service, AccessRules()).openapi()


def fields(document: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Of an object; of a union, the fields of all its members."""
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


def test_it_is_an_openapi_3_0_document(document: dict[str, Any]):
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
