"""Facts of devices that are needed before a model is loaded: dtypes and free memory."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shared.control_groups import available_ram
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.kernels.triton import OLDEST_DEVICE

logger = logging.getLogger(__name__)

# The share of the usable GPU memory for weights, forward passes and KV cache together. The rest is left to sampling, to
# logits of whole prompts, and to gaps between tensors, none of which the largest pass of the warm-up has.
CUDA_SHARE = 0.95
# The share for the KV cache of the RAM that is free after loading. The rest is left to activations and to other
# processes.
CPU_SHARE = 0.3


def choose_dtype(config: EngineConfig, device: torch.device) -> Callable[[torch.dtype | None], torch.dtype]:
    """Returns a function that chooses the dtype to compute in from the checkpoint's."""
    return lambda checkpoint: resolve_dtype(config.dtype, checkpoint, device, custom_kernels=config.custom_kernels)


def resolve_dtype(
    requested: torch.dtype | None, checkpoint: torch.dtype | None, device: torch.device, *, custom_kernels: bool = True
) -> torch.dtype:
    """Returns the dtype to compute in.

    CPUs that multiply bfloat16 natively run all checkpoints but float32 in bfloat16; others run them in their own
    dtype with the engine's kernels, and in float32 without. GPUs without bfloat16 use float16 in its place. dtypes
    that only store weights, such as FP8, count as bfloat16. Raises UnsupportedModel for a requested float16 on a CPU
    without the kernels, where it would be slow.
    """
    on_cpu = device.type == "cpu"
    kernels = on_cpu and custom_kernels and load_kernels()
    if requested is not None:
        if requested is torch.float16 and on_cpu and not kernels:
            raise UnsupportedModel("dtype float16 on a CPU needs the CPU kernels; use --dtype bfloat16 or float32")
        return requested
    dtype = checkpoint or torch.float32
    if dtype not in DTYPES.values():
        dtype = torch.bfloat16
    if on_cpu and dtype is not torch.float32:
        if has_native_bfloat16():
            return torch.bfloat16
        return dtype if kernels else torch.float32
    if device.type == "cuda" and dtype is torch.bfloat16:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_DEVICE:
            logger.warning("computing in float16: this GPU, of compute capability %d.%d, has no bfloat16", *capability)
            return torch.float16
    return dtype


def has_native_bfloat16() -> bool:
    """Returns True if this CPU multiplies bfloat16 matrices in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def cache_bytes(
    device: torch.device, memory_fraction: float, cpu_memory: int | None, processes: int = 1, reserved: int = 0
) -> int:
    """Returns the bytes for keys and values on `device`, once the weights are loaded and the largest pass has run.

    cpu_memory: bytes of RAM; None: a share of the free RAM. processes: number of processes that share the RAM, or
    `cpu_memory`. reserved: bytes of free memory that each process will need for something else, beside `cpu_memory`.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return max(0, int(free + reusable - (1 - CUDA_SHARE * memory_fraction) * total) - reserved)
    if cpu_memory is not None:
        return cpu_memory // processes
    return max(0, int(CPU_SHARE * (available_ram() - reserved * processes))) // processes


def forget_peak(device: torch.device) -> None:
    """Resets the measured peak memory of forward passes, which `cache_bytes` leaves free."""
    if device.type == "cuda":
        gc.collect()  # tensors of an earlier model must not count
        torch.cuda.reset_peak_memory_stats(device)


@dataclass(slots=True)
class Taken:
    """The bytes by which a GPU's free memory has shrunk."""

    bytes: int = 0


@contextlib.contextmanager
def taken_by(device: torch.device) -> Iterator[Taken]:
    """Measures the GPU memory that the block takes and keeps; 0 on a CPU."""
    taken = Taken()
    if device.type != "cuda":
        yield taken
        return
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    yield taken
    torch.cuda.synchronize(device)
    taken.bytes = max(0, before - torch.cuda.mem_get_info(device)[0])
