"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from tgi_server.router.adapter_source import check_id
from tgi_server.router.schemas.base import RefusingModel, RequestModel


def _checked(adapter_id: str) -> str:
    check_id(adapter_id)
    return adapter_id


class LoadAdapterBody(RefusingModel):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}

    lora_name: Annotated[str, AfterValidator(_checked)] = Field(description="The id by which requests name it.")
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Its folder or GGUF file, below the folder of --adapter-root, or relative to that.",
    )


class UnloadAdapterBody(RequestModel):
    lora_name: str
