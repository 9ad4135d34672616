"""/v1/explain: the explanation of a request's prefix-cache miss."""

from pydantic import Field

from tgi_server.router.schemas.base import RequestModel, ResponseModel
from tgi_server.router.schemas.openai import PrefixExplanation


class ExplainRequest(RequestModel):
    request_id: str = Field(min_length=1, max_length=128, description="The `x-request-id` of its response.")
    cache_salt: str | None = Field(default=None, max_length=1024, description="The salt of the request, if it had one.")


class ExplainResponse(ResponseModel, kw_only=True):
    """An explanation. If all users share the cache, numbers are multiples of 128, and `difference` is null."""

    object: str = "explanation"
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    prefix: PrefixExplanation
