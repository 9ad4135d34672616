"""Requests of other services hold those of TGI and OpenAI."""

from typing import Any

import pytest
from pydantic import ValidationError

from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.compatibility import GenerateVertexInstance, SagemakerRequest, VertexRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import CompatGenerateRequest

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"inputs": "hello"}, CompatGenerateRequest), (CHAT, ChatRequest), ({"prompt": "hello"}, CompletionRequest)],
)
def test_a_sagemaker_request_is_the_model_whose_member_it_has(body: dict[str, Any], kind: type):
    assert isinstance(SagemakerRequest.model_validate(body).root, kind)


def test_vertex_instances_may_be_of_both_kinds():
    made = VertexRequest.model_validate({"instances": [{"inputs": "hello"}, CHAT]})
    assert [type(each.root) for each in made.instances] == [GenerateVertexInstance, ChatRequest]


@pytest.mark.parametrize("body", [{}, {"instances": []}, {"instances": [{}]}, {"instances": {"inputs": "hello"}}])
def test_a_vertex_request_needs_an_instance(body: Any):
    with pytest.raises(ValidationError):
        VertexRequest.model_validate(body)
