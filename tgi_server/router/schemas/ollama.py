"""The routes below /api/, as Ollama's clients know them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import Items, Name, RefusingModel, RequestModel, ResponseModel, takes_options
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.chat_tools import Tool
from tgi_server.router.schemas.encoding import MOST_TEXTS
from tgi_server.router.schemas.validation import BY_TYPE

_MOST_LOGPROBS = 20
# Options of the model and its memory, which the server's settings decide; of context shifts; and of mirostat.
_LOADING = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "use_mmap", "use_mlock", "numa"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"),
        *("mirostat_tau", "mirostat_eta"),
    }
)


@takes_options(Dialect.OLLAMA)
class OllamaOptions(RefusingModel):
    """Options of a request. The server's settings decide about the model's context and memory."""

    harmless: ClassVar[frozenset[str]] = _LOADING
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "repeat_last_n": (-1, 64),
        "tfs_z": (1, 1.0),
    }


_NO_OPTIONS = OllamaOptions()


class OllamaModelRequest(RefusingModel):
    """`keep_alive` has no effect: the server's settings decide if a model is put to sleep, and when."""

    harmless: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    model: Name | None = Field(default=None, description="The name of an adapter, or of the model.")


class OllamaGenerationRequest(OllamaModelRequest):
    """The fields that /api/chat and /api/generate have in common."""

    harmless: ClassVar[frozenset[str]] = OllamaModelRequest.harmless | {"shift", "truncate"}
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"_debug_render_only": (False,)}

    stream: bool = True
    options: OllamaOptions = _NO_OPTIONS
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, BY_TYPE] = Field(
        default=None, description="Form of the answer: `json`, or a JSON schema."
    )
    think: Annotated[bool | Literal["low", "medium", "high", "max"] | None, BY_TYPE] = Field(
        default=None, description="If the model thinks, and how much. Default: as its chat template has it."
    )
    logprobs: bool = Field(default=False, description="Report the logprob of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] = Field(
        default=0, description="Number of most likely tokens to report at each position; with `logprobs`."
    )


class OllamaCalledFunction(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"index"})

    name: Name
    arguments: dict[str, Any] = Field(default={})


class OllamaPastCall(RequestModel):
    """A call that the model made earlier in the conversation."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaTurn(RequestModel):
    role: str
    content: str = ""
    thinking: str | None = Field(default=None, description="Thoughts before an answer; templates show them.")
    images: Items[str] = Field(default=[], description="Images in base64, for models that read images.")
    tool_calls: Items[OllamaPastCall] = Field(default=[])
    tool_name: str | None = Field(default=None, description="The tool whose result this is.")
    tool_call_id: str | None = Field(
        default=None, description="The call whose result this is. Default: results are in the order of the calls."
    )


class OllamaChatRequest(OllamaGenerationRequest):
    messages: Items[OllamaTurn] = Field(default=[], description="None: nothing is generated.")
    tools: Items[Tool] = Field(default=[], description="Functions that the model may call.")


class OllamaGenerateRequest(OllamaGenerationRequest):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaGenerationRequest.refused,
        "context": ([],),
        "suffix": ("",),
        "template": ("",),
    }

    prompt: str = Field(default="", description="What the user says. Empty: nothing is generated.")
    system: str | None = Field(default=None, description="What the system says.")
    images: Items[str] = Field(default=[], description="Images in base64, for models that read images.")
    raw: bool = Field(default=False, description="The model gets the prompt as it is, without the chat template.")


class OllamaEmbedRequest(OllamaModelRequest):
    harmless: ClassVar[frozenset[str]] = OllamaModelRequest.harmless | {"options"}

    input: Annotated[
        str | Annotated[list[str], Field(max_length=MOST_TEXTS, fail_fast=True)],
        BY_TYPE,
    ]
    truncate: bool = Field(default=True, description="A text that is too long loses its end; otherwise it is refused.")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="The first numbers of each embedding, normalized."
    )


class OllamaEmbeddingsRequest(OllamaModelRequest):
    harmless: ClassVar[frozenset[str]] = OllamaModelRequest.harmless | {"options"}

    prompt: str = Field(default="", description="The text. Empty: there is no embedding.")


class OllamaNamedRequest(RequestModel):
    model: Name = Field(validation_alias=AliasChoices("model", "name"), description="Also called `name`.")


class OllamaShowRequest(OllamaNamedRequest):
    harmless: ClassVar[frozenset[str]] = frozenset({"options", "system", "template", "verbose"})


class OllamaPullRequest(OllamaNamedRequest):
    harmless: ClassVar[frozenset[str]] = frozenset({"insecure", "password", "username"})

    stream: bool = True


class OllamaMadeFunction(ResponseModel, kw_only=True):
    index: int
    name: str
    arguments: Any


class OllamaMadeCall(ResponseModel, kw_only=True):
    id: str
    function: OllamaMadeFunction


class OllamaMessage(ResponseModel, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaMadeCall] | UnsetType = UNSET


class OllamaAnswer(ResponseModel, kw_only=True):
    """An answer, or a piece of it. The last one has `done_reason`, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatCompletionLogprob] | UnsetType = UNSET


class OllamaChatResponse(OllamaAnswer, kw_only=True):
    message: OllamaMessage


class OllamaGenerateResponse(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedResponse(ResponseModel, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingsResponse(ResponseModel, kw_only=True):
    embedding: list[float]


class OllamaDetails(ResponseModel, kw_only=True):
    """`family`: the `model_type` of the model's configuration. `parent_model`: of an adapter."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int | UnsetType = UNSET


class OllamaModel(ResponseModel, kw_only=True):
    """`digest`: SHA-256 of the model's id and revision. `size`: bytes of the files of weights; 0 if they are not known.
    `size_vram`: the same on a GPU, 0 on a CPU. `expires_at`, `size_vram` and `context_length`: in /api/ps.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(ResponseModel, kw_only=True):
    models: list[OllamaModel]


class OllamaShowResponse(ResponseModel, kw_only=True):
    modified_at: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""


class OllamaStatus(ResponseModel, kw_only=True):
    status: str


class OllamaError(ResponseModel, kw_only=True):
    error: str


class OllamaVersion(ResponseModel, kw_only=True):
    version: str
