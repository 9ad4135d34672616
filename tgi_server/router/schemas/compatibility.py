"""/invocations (Amazon SageMaker) and /vertex (Google Vertex AI)."""

from typing import Annotated

from pydantic import Field, RootModel

from tgi_server.router.schemas.base import Items, RequestModel, ResponseModel
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
)
from tgi_server.router.schemas.validation import BY_TYPE


class SagemakerRequest(RootModel[Annotated[CompatGenerateRequest | ChatRequest | CompletionRequest, BY_TYPE]]):
    """A body with `inputs`, `messages` or `prompt`, which decides its form."""


class GenerateVertexInstance(RequestModel):
    inputs: str
    parameters: GenerateParameters | None = None


class VertexInstance(RootModel[Annotated[GenerateVertexInstance | ChatRequest, BY_TYPE]]):
    """An instance with `inputs` or `messages`, which decides its form."""


class VertexRequest(RequestModel):
    instances: Items[VertexInstance] = Field(min_length=1)


class VertexResponse(ResponseModel, kw_only=True):
    predictions: list[str]
