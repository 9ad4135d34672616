"""Settings of an engine."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tgi_server.engine.parallel import ShardGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    model_path: a local folder in `transformers` format.
    dtype: dtype of weights, activations and KV cache; None: the checkpoint's, or one that the device computes fast.
    kv_cache_dtype: dtype of cached keys and values, one of KV_CACHE_DTYPES; None: dtype.
    device: CUDA when there is one, else the CPU.
    memory_fraction: share of a GPU's memory that weights, activations and KV cache may use together.
    custom_kernels: kernels and layers of the engine's own may stand in for those of torch and transformers.
    linear_kernels: the kernels of linear layers on a CPU, such as "fma" or "fma,fma_dequant@32"; None: those of a
        table for each kind of CPU.
    quantize: how the weights of linear layers are rounded while they are loaded, or how the checkpoint is quantised
        (`checkpoint/quantized/recognition.py`); None: as the checkpoint is.
    cpu_memory: bytes of RAM for the KV cache on a CPU, of all shards on a machine; None: a share of what is free.
    cuda_graphs: CUDA-graph batch sizes, for which decoding is captured; empty: nothing is, nor are steps with prompts;
        None: the default ones. On a CPU, and for models whose steps cannot be captured, there are none.
    speculate: tokens that are drafted for a sequence in one step, at most; 0: none are. Only for models whose batches
        are paged.
    speculative_model: the folder of a draft model with the same tokenizer; None: drafts come from texts, if `speculate`
        says that there are any.
    image_memory: bytes for what the vision tower has made of images, which is used again for the same images; 0: the
    tower is not loaded, and no prompt may have images.
    max_lora_rank: rank that a layer of an adapter may have, at most.
    packed_cache: a folder for packed weights, which later starts read in place of the checkpoint; None: there is none.
    group: the shards that compute the model together, this one among them; None: this process computes it alone.
    """

    model_path: Path
    dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=_default_device)
    memory_fraction: float = 0.9
    cpu_memory: int | None = None
    custom_kernels: bool = True
    linear_kernels: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    cuda_graphs: tuple[int, ...] | None = None
    speculate: int = 0
    speculative_model: Path | None = None
    image_memory: int = 256 << 20
    max_lora_rank: int = 256
    packed_cache: Path | None = None
    group: ShardGroup | None = None
