"""/tokenize."""

from pydantic import RootModel

from tgi_server.router.schemas.base import ResponseModel, UnsignedInt


class SimpleToken(ResponseModel):
    id: UnsignedInt
    text: str
    start: UnsignedInt
    stop: UnsignedInt


class TokenizeResponse(RootModel[list[SimpleToken]]):
    """`start` and `stop` count characters of the input."""
