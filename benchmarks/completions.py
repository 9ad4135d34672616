"""What the small servers to compare with have in common: a request, and the routes that a measurement needs."""

from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, Field


class CompletionRequest(BaseModel):
    """OpenAI's `/v1/completions`."""

    prompt: str
    max_tokens: Annotated[int, Field(ge=1)] = 16
    ignore_eos: bool = False
    stream: bool = False


class Lifespan(Protocol):
    def __call__(self, app: FastAPI, /) -> AbstractAsyncContextManager[None]: ...


def create_app(model: str, lifespan: Lifespan) -> FastAPI:
    """An application that tells that it is healthy, and the one model that it has. lifespan: runs what generates."""
    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model"}]}

    return app


def completion(model: str, text: str, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """A whole reply."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
    return {"model": model, "choices": [{"index": 0, "text": text}], "usage": usage}
