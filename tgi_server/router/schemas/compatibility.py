"""/invocations (Amazon SageMaker) and /vertex (Google Vertex AI)."""

from pydantic import Field, RootModel

from tgi_server.router.schemas.base import Items, RequestModel, ResponseModel
from tgi_server.router.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from tgi_server.router.schemas.completions import Chunk, CompletionFinal, CompletionRequest
from tgi_server.router.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
    GenerateResponse,
    StreamResponse,
)


class SagemakerRequest(RootModel[CompatGenerateRequest | ChatRequest | CompletionRequest]):
    """Told apart by `inputs`, `messages` or `prompt`."""


class SagemakerResponse(RootModel[list[GenerateResponse] | GenerateResponse | ChatCompletion | CompletionFinal]):
    """The response of the route that takes the same request; for `inputs`, that of `/`."""


class SagemakerStreamResponse(RootModel[StreamResponse | ChatCompletionChunk | Chunk]):
    pass


class GenerateVertexInstance(RequestModel):
    inputs: str
    parameters: GenerateParameters | None = None


class VertexInstance(RootModel[GenerateVertexInstance | ChatRequest]):
    """Told apart by `inputs` or `messages`."""


class VertexRequest(RequestModel):
    instances: Items[VertexInstance] = Field(min_length=1)


class VertexResponse(ResponseModel):
    predictions: list[str]
