"""Bodies of /tokenize and /detokenize, in TGI's form and in vLLM's, and of /tokenizer_info."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from pydantic import Field, RootModel

from tgi_server.router.schemas.base import RequestModel, ResponseModel, UnsignedInt
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.validation import BY_TYPE

_TOKEN_STRS = Field(default=False, description="Report the tokens as the vocabulary has them.")


class TokenizeRequest(RequestModel):
    """TGI's form. Parameters of a generation are ignored."""

    inputs: str = Field(min_length=1)


class TokenizePromptRequest(RequestModel):
    """vLLM's form for a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = Field(default=True, description="Add special tokens, such as BOS.")
    return_token_strs: bool = _TOKEN_STRS


class TokenizeChatRequest(ChatRequest):
    """vLLM's form for a conversation: a request of /v1/chat/completions, whose prompt is tokenized."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: harmless for name, harmless in ChatRequest.refused.items() if name != "add_special_tokens"},
        **{"media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "prompt": ()},
    }

    add_special_tokens: bool = Field(
        default=False, description="Add special tokens, such as BOS, beside the ones that the chat template writes."
    )
    return_token_strs: bool = _TOKEN_STRS


_Forms = TokenizeRequest | TokenizeChatRequest | TokenizePromptRequest


class AnyTokenizeRequest(RootModel[Annotated[_Forms, BY_TYPE]]):
    """A body with `inputs`, `messages` or `prompt`, which decides its form."""


class TokenizedPrompt(ResponseModel, kw_only=True):
    """vLLM's response. `tokens` are ids."""

    count: int
    max_model_len: Annotated[int, Meta(description="tokens of a prompt with its answer")]
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    tokens: Annotated[list[UnsignedInt], Field(max_length=1_000_000, fail_fast=True)]


class DetokenizeResponse(ResponseModel, kw_only=True):
    """`prompt` is the text, special tokens included; the name is vLLM's."""

    prompt: str


class TokenizerInfo(ResponseModel, kw_only=True):
    """The content of `tokenizer_config.json`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    chat_template: str | None
