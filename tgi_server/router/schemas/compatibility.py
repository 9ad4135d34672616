"""/invocations (Amazon SageMaker) and /vertex (Google Vertex AI)."""

from pydantic import Field, RootModel

from tgi_server.router.schemas.base import Items, RequestModel, ResponseModel
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
)


class SagemakerRequest(RootModel[CompatGenerateRequest | ChatRequest | CompletionRequest]):
    """Told apart by `inputs`, `messages` or `prompt`."""


class GenerateVertexInstance(RequestModel):
    inputs: str
    parameters: GenerateParameters | None = None


class VertexInstance(RootModel[GenerateVertexInstance | ChatRequest]):
    """Told apart by `inputs` or `messages`."""


class VertexRequest(RequestModel):
    instances: Items[VertexInstance] = Field(min_length=1)


class VertexResponse(ResponseModel, kw_only=True):
    predictions: list[str]
