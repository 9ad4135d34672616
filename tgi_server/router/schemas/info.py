"""/info and /v1/models."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from tgi_server.router.schemas.base import ResponseModel


class AdapterInfo(ResponseModel, kw_only=True):
    """An adapter that requests may name. ready: it is in the shards' memory, and need not be read first."""

    id: str
    rank: int
    ready: bool


class EncoderInfo(ResponseModel, kw_only=True):
    """A model that embeds or ranks. columns: numbers of an embedding, or labels."""

    task: Literal["embed", "rank"]
    model_id: str
    dtype: str
    max_tokens: Annotated[int, Meta(description="of one text, or pair")]
    columns: int
    pooling: str | None


class Info(ResponseModel, kw_only=True):
    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    model_device_type: Annotated[str, Meta(description="cpu or cuda")]
    model_dtype: Annotated[str, Meta(description="dtype of activations, such as bfloat16")]
    paged: Annotated[bool, Meta(description="the KV cache is in blocks; false: batches are padded, which is slower")]
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    speculate: int
    reads_images: bool
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_batch_total_tokens: Annotated[int, Meta(description="tokens that the KV cache has room for")]
    linear_kernels: str | None = None
    forward_pass: Annotated[
        str | None,
        Meta(
            description="how a step is computed: one kernel call, fused layers, or plain torch or transformers, which "
            "are slower; on GPUs also what computes attention"
        ),
    ] = None
    fallbacks: Annotated[
        list[str], Meta(description="why parts of the model are computed in a slower way than the device has")
    ]
    encoders: Annotated[list[EncoderInfo], Meta(description="models that embed and rank")]
    adapters: Annotated[list[AdapterInfo], Meta(description="that requests may name")]
    models: Annotated[list[str] | UnsetType, Meta(description="that generate, of several models")] = UNSET


class SleepInfo(ResponseModel):
    is_sleeping: bool


class VersionInfo(ResponseModel, kw_only=True):
    """The version of the server itself; /info has one that can be compared with TGI's."""

    version: str


class ModelInfo(ResponseModel, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: Annotated[str | None, Meta(description="of an adapter: its base model")] = None
    state: Annotated[
        Literal["awake", "asleep", "loading", "failed"] | UnsetType, Meta(description="where several models are served")
    ] = UNSET
    reason: Annotated[str | UnsetType, Meta(description="why the model failed")] = UNSET


class ModelsInfo(ResponseModel, kw_only=True):
    object: Literal["list"]
    data: list[ModelInfo]


class AnthropicModel(ResponseModel, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(ResponseModel, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
