"""Each member of a request that an SDK can send is decided: read, accepted without effect, left out, or refused."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from tests.sdk_types import undecided
from tgi_server.router.schemas.base import Items, LeftOut, Refused, RequestModel
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.encoding import EmbeddingsRequest
from tgi_server.router.schemas.messages import CountTokensRequest, MessagesRequest
from tgi_server.router.schemas.responses import InputTokensRequest, ResponsesRequest
from tgi_server.router.schemas.validation import BY_TYPE

SDK_TYPES: list[tuple[Any, type[BaseModel]]] = [
    (message_create_params.MessageCreateParamsNonStreaming, MessagesRequest),
    (message_create_params.MessageCreateParamsStreaming, MessagesRequest),
    (beta_create_params.MessageCreateParamsNonStreaming, MessagesRequest),
    (beta_create_params.MessageCreateParamsStreaming, MessagesRequest),
    (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    (beta_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatRequest),
    (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponsesRequest),
    (response_create_params.ResponseCreateParamsStreaming, ResponsesRequest),
    (input_token_count_params.InputTokenCountParams, InputTokensRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingsRequest),
]


@pytest.mark.parametrize(("sdk_type", "model"), SDK_TYPES)
def test_every_member_that_an_sdk_can_send_is_decided(sdk_type: Any, model: type[BaseModel]):
    assert undecided(sdk_type, model) == []


class TextParam(TypedDict, total=False):
    type: Literal["text"]
    text: str
    mood: Literal["calm", "loud"]
    note: str


class VideoParam(TypedDict, total=False):
    type: Literal["video"]
    url: str


class SearchParam(TypedDict, total=False):
    type: Literal["search_1", "search_2"]
    query: str


class Params(TypedDict, total=False):
    blocks: Iterable[TextParam | VideoParam | SearchParam] | str
    label: dict[str, TextParam]
    level: int


class Text(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"note"})

    type: Literal["text"]
    text: str
    mood: Literal["calm"] | None = None


class Searching(LeftOut):
    known: ClassVar[frozenset[str]] = frozenset({"search_1"})


class NoVideo(Refused):
    type: Literal["video"]


class Known(RequestModel):
    blocks: Items[Annotated[Text | Searching, BY_TYPE]]
    label: dict[str, Any] | None = None


class KnownVideo(RequestModel):
    blocks: Items[Text | NoVideo]


def test_what_a_newer_sdk_brings_is_found():
    """Fields, members of unions, and values."""
    assert undecided(Params, Known) == [
        "blocks[text].mood=loud",
        "blocks[video]",
        "blocks[search_2]",
        "level",
    ]
    assert "blocks[video]" not in undecided(Params, KnownVideo)
