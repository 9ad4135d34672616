"""/v1/warm: prompts that are computed before they are needed; /v1/forget: prompts that are not to be cached."""

from typing import Annotated

from pydantic import Field, RootModel

from tgi_server.router.schemas.base import RequestModel, ResponseModel
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import GenerateRequest
from tgi_server.router.schemas.validation import BY_TYPE

_TTL = Field(default=300.0, gt=0, le=3600, description="Seconds for which the prompt and the answer are held.")
_ANSWER_TOKENS = Field(
    default=0, ge=0, le=512, description="Generate so many tokens of the answer, too, for a request with the same body."
)


class WarmChatRequest(ChatRequest):
    ttl_seconds: float = _TTL
    answer_tokens: int = _ANSWER_TOKENS


class WarmCompletionRequest(CompletionRequest):
    ttl_seconds: float = _TTL
    answer_tokens: int = _ANSWER_TOKENS


class WarmGenerateRequest(GenerateRequest):
    ttl_seconds: float = _TTL
    answer_tokens: int = _ANSWER_TOKENS


class WarmRequest(RootModel[Annotated[WarmChatRequest | WarmCompletionRequest | WarmGenerateRequest, BY_TYPE]]):
    """A chat, a completion or a prompt of TGI's API: the body has `messages`, `prompt` or `inputs`."""


class WarmResponse(ResponseModel, kw_only=True):
    """`cached_tokens`: prompt tokens that had been computed before, in multiples of 128 if all users share the cache.

    `answer_tokens`: tokens of the answer that have been computed; fewer than requested if the answer ended, or if its
    request came meanwhile.
    """

    object: str = "warm"
    prompt_tokens: int
    cached_tokens: int
    ttl_seconds: float
    answer_tokens: int


class ForgetRequest(RequestModel):
    cache_salt: str = Field(min_length=1, max_length=1024, description="The salt of the prompts and answers to forget.")


class ForgetResponse(ResponseModel, kw_only=True):
    """`files` that were deleted (`--prefix-cache-disk`)."""

    object: str = "forgotten"
    files: int
