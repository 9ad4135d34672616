"""/info and /v1/models."""

from typing import Literal

from pydantic import Field

from tgi_server.router.schemas.base import ResponseModel, UnsignedInt


class AdapterInfo(ResponseModel):
    """An adapter that requests may name. ready: it is in the shards' memory, and need not be read first."""

    id: str
    rank: UnsignedInt
    ready: bool


class Info(ResponseModel):
    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    model_device_type: str = Field(description="cpu or cuda")
    model_dtype: str = Field(description="dtype of activations, such as bfloat16")
    paged: bool = Field(description="the KV cache is in blocks; false: batches are padded, which is slower")
    max_concurrent_requests: UnsignedInt
    max_best_of: UnsignedInt
    max_stop_sequences: UnsignedInt
    max_input_tokens: UnsignedInt
    max_total_tokens: UnsignedInt
    validation_workers: UnsignedInt
    max_client_batch_size: UnsignedInt
    speculate: UnsignedInt
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_batch_total_tokens: UnsignedInt = Field(description="tokens that the KV cache has room for")
    linear_kernels: str | None = None
    fallbacks: list[str] = Field(
        default_factory=list, description="why parts of the model are computed in a slower way than the device has"
    )
    adapters: list[AdapterInfo] = Field(default_factory=list, description="that requests may name")


class VersionInfo(ResponseModel):
    """The version of the server itself; /info has one that can be compared with TGI's."""

    version: str


class ModelInfo(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = Field(default=None, description="of an adapter: its base model")


class ModelsInfo(ResponseModel):
    object: Literal["list"]
    data: list[ModelInfo]
