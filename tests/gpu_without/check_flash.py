"""Prompts by `flash-attn-4`, which needs a GPU: its function is replaced by one with the same parameters."""

import ast
import inspect
import sys
from importlib.metadata import PackageNotFoundError, distribution
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_without.check_kernels import VARIANTS, products_of_bfloat16  # noqa: F401
from tests.tiny_models import build
from tests.unit.engine.backends.attention.test_backends import expected, run
from tgi_server.engine.backends import cuda
from tgi_server.engine.backends.attention import flash
from tgi_server.engine.backends.attention.base import AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.backends.attention.flash import FlashAttention, fault_of
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.models.families import family_of

# Of version 4.0.0b36.
PARAMETERS = [
    "q", "k", "v", "qv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "seqused_q",
    "seqused_k", "gather_kv_indices", "page_table", "softmax_scale", "causal", "window_size", "learnable_sink",
    "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod", "score_mod_bwd", "mask_mod",
    "block_sparse_tensors", "aux_tensors", "aux_scalars", "return_lse", "scheduler_metadata", "seqlen_k_per_split",
    "disable_scheduler_metadata", "gather_bwd_recompute_p", "gather_bwd_token_chunk",
]  # fmt: skip
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
SIGNATURE = inspect.Signature(
    [
        *(inspect.Parameter(name, _EITHER) for name in PARAMETERS[:3]),
        *(inspect.Parameter(name, _EITHER, default=None) for name in PARAMETERS[3:]),
    ]
)
CPU = torch.device("cpu")


def flash_attn_varlen_func(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
    """Attends in plain torch, and checks what the library checks."""
    bound = SIGNATURE.bind(*arguments, **named)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    sequences = len(given.cu_seqlens_q) - 1
    assert given.page_table.shape[0] == sequences
    assert given.seqused_k.shape == (sequences,)
    assert given.seqused_q is None or given.seqused_q.shape == (sequences,)
    for lengths in (given.cu_seqlens_q, given.seqused_q, given.seqused_k, given.page_table):
        assert lengths is None or (lengths.dtype is torch.int32 and lengths.stride(-1) == 1)
    assert given.q.dtype == given.k.dtype == given.v.dtype != torch.float32
    assert given.causal is True
    assert given.cu_seqlens_q.diff().max() <= given.max_seqlen_q
    left, right = given.window_size
    assert right in (0, None)
    variant = AttentionVariant(
        given.softmax_scale,
        window=0 if left is None else left + 1,
        softcap=given.softcap,
        sinks=given.learnable_sink,
    )
    output = torch.full_like(given.q, torch.nan)
    for index in range(sequences):
        start = int(given.cu_seqlens_q[index])
        count = int(given.cu_seqlens_q.diff()[index] if given.seqused_q is None else given.seqused_q[index])
        length = int(given.seqused_k[index])
        pages = given.page_table[index].long()
        key, value = (cache[pages].flatten(0, 1)[:length].float() for cache in (given.k, given.v))
        if count:
            own = expected(given.q[start : start + count].float(), key, value, variant)
            output[start : start + count] = own.to(output.dtype)
    return output, None


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_WITHOUT_WINDOW", 60)
    monkeypatch.setattr(flash, "_BEHIND", 20)


@pytest.fixture(autouse=True)
def fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=library))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", library)
    monkeypatch.setattr(flash, "version", lambda name: "4.0.0b36")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def backend(dtype: torch.dtype = torch.bfloat16) -> FlashAttention:
    return FlashAttention(KVShape((2,), 32), CPU, dtype)


@pytest.mark.parametrize("kind", ["plain", "wide window", "soft cap", "alibi", "sinks", "wide window, sinks"])
@pytest.mark.parametrize("decodes", [[1, 33, 130], []], ids=["beside rows that decode", "alone"])
def test_prompts_are_attended_to_as_in_plain_torch(decodes: list[int], kind: str) -> None:
    actual, wanted = run(backend(), 6, 2, decodes, [(0, 50), (95, 37), (96, 1)], VARIANTS[kind])
    torch.testing.assert_close(actual, wanted, rtol=4e-2, atol=4e-2)


def test_what_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(head_dim: int, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return FlashAttention.supports(KVShape((2,), head_dim), dtype)

    assert all(takes(128, capability) for capability in ((9, 0), (10, 0), (10, 3), (11, 0)))
    assert not any(takes(128, capability) for capability in ((8, 0), (8, 9), (12, 0)))
    assert not takes(128, (9, 0), torch.float32)
    assert takes(192, (9, 0))
    assert takes(256, (10, 0))
    assert not takes(192, (10, 0))
    assert not takes(100, (9, 0))
    monkeypatch.setattr(flash, "version", lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))
    assert not takes(128, (9, 0))


def test_a_window_behind_the_texts_of_the_proof_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of(backend(), {90}) is None

    def one_less(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
        left, right = named["window_size"]
        return flash_attn_varlen_func(*arguments, **named | {"window_size": (left and left - 60, right)})

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", one_less)
    assert "in a window of 90 tokens" in str(fault_of(backend(), {90}))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_falls_back_to_the_engines_kernel(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong:
        monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", lambda q, *_, **__: q * 0)
    model = build("llama", dtype=torch.bfloat16)
    own = cuda.CudaBackend(model, EngineConfig(model.name_or_path, device=CPU))
    paged = own.create_model(family_of(model.config), None)
    assert paged is not None
    assert type(paged.attention) is (CudaAttention if wrong else FlashAttention)
    assert len(own.fallbacks) == wrong
    assert all(each.startswith("attention runs in the engine's own kernel") for each in own.fallbacks)


def test_the_parameters_are_those_of_the_installed_library() -> None:
    try:
        files = distribution("flash-attn-4").files or ()
    except PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")
    source = next(file for file in files if str(file) == "flash_attn/cute/interface.py").read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert [each.arg for each in functions["flash_attn_varlen_func"].args.args] == PARAMETERS
