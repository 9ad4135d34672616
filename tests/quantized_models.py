"""Tiny models in the layouts of published quantised checkpoints, written by hand, each beside the same model dense.

    quantized, dense = make_quantized("gptq", tmp_path, architecture="qwen2")

The dense model has, in float32, the very weights that the quantised one stands for.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from tests.tiny_models import make

Tensors = dict[str, Tensor]
# (path of the layer, its weight, [outputs, inputs]) -> the tensors to write, and the weight that they stand for
Packer = Callable[[str, Tensor], tuple[Tensors, Tensor]]

GROUP = 32
BLOCK = 32
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = 448.0
_NOT_QUANTIZED = ("embed", "lm_head", "norm", "router", "wte", "wpe", "mlp.gate.weight", "block_sparse_moe.gate.weight")


def make_quantized(
    layout: str, folder: Path, architecture: str = "llama", *, keep: Sequence[str] = (), **overrides: Any
) -> tuple[Path, Path]:
    """Returns the folders of a quantised model and of its dense twin.

    layout: one of LAYOUTS. keep: parts of the names of tensors that are not quantised.
    """
    packer, settings = LAYOUTS[layout]
    quantized, dense = folder / "quantized", folder / "dense"
    make(architecture, dense, **overrides)
    make(architecture, quantized, **overrides)
    written: Tensors = {}
    equal: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if (
            not name.endswith(("weight", "_proj"))
            or tensor.dim() < 2
            or any(part in name for part in (*_NOT_QUANTIZED, *keep))
        ):
            written[name] = equal[name] = tensor
        elif (tensor.dim() == 3) == (layout == "mxfp4"):
            outputs_last = architecture == "gpt2"
            tensors, weight = packer(name.removesuffix(".weight"), tensor.T if outputs_last else tensor)
            equal[name] = weight.T if outputs_last else weight
            written |= tensors
        else:
            written[name] = equal[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in equal.items()}, dense / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, quantized / "model.safetensors")
    set_config(quantized, quantization_config=settings)
    return quantized, dense


def set_config(folder: Path, **settings: Any) -> None:
    """Changes the model's config.json; None removes a setting."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Returns [words, n] int32 of [count, n] numbers, low bits first."""
    places = torch.arange(len(numbers)) * bits
    words = torch.zeros(math.ceil(len(numbers) * bits / 32) + 1, numbers.shape[1], dtype=torch.int64)
    for place, row in zip(places.tolist(), numbers.long(), strict=True):
        word, shift = divmod(place, 32)
        words[word] |= (row << shift) & 0xFFFFFFFF
        words[word + 1] |= row >> (32 - shift)
    words = words[: math.ceil(len(numbers) * bits / 32)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _rounded(
    weight: Tensor, bits: int, size: int, *, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns codes [N, K], zeros and float16 scales [N, G], the groups of inputs [K], and the dense weight."""
    outputs, inputs = weight.shape
    size = inputs if size < 0 else size
    groups = torch.arange(inputs) // size if groups is None else groups
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(outputs, count), torch.empty(outputs, count)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / max(1, top // 2)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, top)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes, zeros, scales, groups, (codes - zeros[:, groups]) * scales[:, groups]


def _gptq(
    bits: int = 4, size: int = GROUP, *, symmetric: bool = True, act_order: bool = False, v2: bool = False
) -> Any:
    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        groups = order // (inputs if size < 0 else size) if act_order else None
        codes, zeros, scales, groups, dense = _rounded(weight, bits, size, symmetric=symmetric, groups=groups)
        tensors = {
            "qweight": packed(codes.T, bits),
            "qzeros": packed(zeros - (0 if v2 else 1), bits).T,
            "scales": scales.T.half(),
            "g_idx": groups.to(torch.int32),
        }
        return {f"{path}.{name}": tensor for name, tensor in tensors.items()}, dense

    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    return pack, settings | ({"checkpoint_format": "gptq_v2"} if v2 else {})


def _awq(size: int = GROUP) -> Any:
    def words(numbers: Tensor) -> Tensor:
        eights = numbers.view(-1, 8, numbers.shape[1])[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        return torch.cat([packed(eight, 4) for eight in eights]).T

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, _, dense = _rounded(weight, 4, size, symmetric=False)
        tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.half()}
        return {f"{path}.{name}": tensor for name, tensor in tensors.items()}, dense

    return pack, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}


def _bitsandbytes(kind: str, *, double: bool = False) -> Any:
    codebook = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.5

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        absmax = blocks.abs().amax(1).clamp(min=1e-6)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
        extra: Tensors = {}
        if double:
            offset, levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
            nested = pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256).abs().amax(1)
            scale = nested.repeat_interleave(256)[: len(absmax)]
            stored = ((absmax - offset) / scale).sub(levels.unsqueeze(1)).abs().argmin(0).to(torch.uint8)
            absmax = levels[stored.long()] * scale + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            extra = {"absmax": stored, "nested_absmax": nested, "nested_quant_map": levels}
        codes = (blocks / absmax.unsqueeze(1)).unsqueeze(-1).sub(codebook).abs().argmin(-1)
        dense = (codebook[codes] * absmax.unsqueeze(1)).flatten()[: weight.numel()].view_as(weight)
        pairs = codes.flatten()[: weight.numel()].view(-1, 2)
        tensors = {name: each.clone() for name, each in ({"absmax": absmax, "quant_map": codebook} | extra).items()}
        tensors["quant_state.bitsandbytes__" + kind] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        named = {f"{path}.weight.{name}": tensor for name, tensor in tensors.items()}
        return named | {f"{path}.weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)}, dense

    return pack, {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
    }


def _pack_bitsandbytes_int8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest.unsqueeze(1) * 127).round()
    tensors = {f"{path}.weight": codes.to(torch.int8), f"{path}.SCB": largest}
    tensors[f"{path}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, codes * (largest / 127).unsqueeze(1)


def _compressed_integers(bits: int, *, size: int = GROUP, symmetric: bool = True, act_order: bool = False) -> Any:
    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) // GROUP
        groups = order if act_order else None
        codes, zeros, scales, groups, dense = _rounded(weight, bits, size, symmetric=symmetric, groups=groups)
        tensors = {
            "packed": packed(codes.T, bits).T,
            "scale": scales.half(),
            "shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["zero_point"] = packed(zeros, bits)
        if act_order:
            tensors["g_idx"] = groups.to(torch.int32)
        return {f"{path}.weight_{name}": tensor for name, tensor in tensors.items()}, dense

    groups = {"strategy": "channel"} if size < 0 else {"strategy": "group", "group_size": size}
    weights = {**groups, "symmetric": symmetric}
    return pack, _compressed(bits, "int", "pack-quantized", **weights)


def _compressed(bits: int, kind: str, layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def _pack_rows_int8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {f"{path}.weight": codes.to(torch.int8), f"{path}.weight_scale": scales}, codes * scales


def _pack_rows_int8_with_zeros(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, _, dense = _rounded(weight, 8, -1, symmetric=False)
    tensors = {"": (codes - 128).to(torch.int8), "_scale": scales, "_zero_point": (zeros - 128).to(torch.int8)}
    return {f"{path}.weight{name}": tensor for name, tensor in tensors.items()}, dense


def _pack_rows_fp8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / _FP8_LARGEST
    codes = (weight / scales).to(_FP8)
    return {f"{path}.weight": codes, f"{path}.weight_scale": scales}, codes.float() * scales


def _pack_modelopt_rows(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    tensors, dense = _pack_rows_fp8(path, weight)
    return {name: each.flatten() if name.endswith("scale") else each for name, each in tensors.items()}, dense


def _pack_whole_fp8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / _FP8_LARGEST
    codes = (weight / scale).to(_FP8)
    extra = {f"{path}.weight_scale": scale.view(1), f"{path}.input_scale": torch.ones(1)}
    return {f"{path}.weight": codes, **extra}, codes.float() * scale


def _pack_blocks_fp8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    outputs, inputs = weight.shape
    whole = pad(weight, (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    scales = whole.view(-(-outputs // BLOCK), BLOCK, -1, BLOCK).abs().amax((1, 3)) / _FP8_LARGEST
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:outputs, :inputs]
    codes = (weight / spread).to(_FP8)
    return {f"{path}.weight": codes, f"{path}.weight_scale_inv": scales}, codes.float() * spread


def _pack_compressed_blocks_fp8(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    tensors, dense = _pack_blocks_fp8(path, weight)
    return {name.removesuffix("_inv"): tensor for name, tensor in tensors.items()}, dense


def _pack_mxfp4(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.transpose(1, 2).unflatten(-1, (-1, 32))  # [experts, outputs, blocks, 32]
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-100, 100)
    scales = exponents.exp2().unsqueeze(-1)
    codes = (blocks / scales).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    dense = (numbers[codes] * scales).flatten(-2).transpose(1, 2)
    return {f"{path}_blocks": pairs, f"{path}_scales": (exponents + 127).to(torch.uint8)}, dense


def _by_layer(usual: Any, others: dict[str, Any], **settings: Any) -> Any:
    """Packs the layers whose paths have a key of `others` in another way; None: not at all."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        layout = next((layout for part, layout in others.items() if part in path), usual)
        return ({f"{path}.weight": weight}, weight) if layout is None else layout[0](path, weight)

    return pack, usual[1] | settings


_DYNAMIC = {
    r"+:.*\.q_proj": {"bits": 8, "group_size": 16, "desc_act": True},
    r".*\.o_proj": {"bits": 2, "group_size": -1, "sym": False},
    r"-:model\.layers\.1\.mlp\.down_proj": {},
    r".*\.v_proj": {"bits": 3},
}
_IN_OTHER_BITS = {
    "q_proj": _gptq(8, 16, act_order=True),
    "o_proj": _gptq(2, -1, symmetric=False),
    "layers.1.mlp.down_proj": None,
    "v_proj": _gptq(3),
}
_AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "autoround_version": "0.9.0", "version": None}
_EXTRA = {
    ".*q_proj": {"bits": 8, "group_size": 16, "sym": True, "data_type": "int", "act_bits": 16},
    "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "fp"},
    ".*o_proj": {"bits": 2, "group_size": -1},
    ".*v_proj": {"bits": 3},
}
_DYNAMIC_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

# By name: what packs a layer's weight, and the quantization_config of the model's config.json.
LAYOUTS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": _gptq(),
    "gptq_2_bits": _gptq(2, symmetric=False),
    "gptq_3_bits": _gptq(3),
    "gptq_6_bits": _gptq(6, symmetric=False),
    "gptq_8_bits": _gptq(8),
    "gptq_8_bits_act_order": _gptq(8, act_order=True, symmetric=False),
    "gptq_asymmetric": _gptq(symmetric=False),
    "gptq_act_order": _gptq(act_order=True, symmetric=False),
    "gptq_v2": _gptq(v2=True, symmetric=False),
    "gptq_one_group": _gptq(size=-1),
    "gptq_dynamic": _by_layer(_gptq(), _IN_OTHER_BITS, dynamic=_DYNAMIC),
    "auto_round_gptq": _by_layer(
        _gptq(), _IN_OTHER_BITS, **_AUTO_ROUND, packing_format="auto_round:auto_gptq", extra_config=_EXTRA
    ),
    "auto_round_without_lower_zeros": _by_layer(
        _gptq(symmetric=False, v2=True), {}, **_AUTO_ROUND, packing_format="auto_round", checkpoint_format=None
    ),
    "auto_round_awq": _by_layer(
        _awq(),
        {"q_proj": _awq(16), "down_proj": None},
        **_AUTO_ROUND,
        packing_format="auto_round:auto_awq",
        extra_config={"model.layers.0.self_attn.q_proj": {"group_size": 16}, ".*down_proj": {"bits": 16}},
    ),
    "modelopt_fp8": (
        _pack_whole_fp8,
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
    "modelopt_fp8_rows": (_pack_modelopt_rows, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}),
    "awq": _awq(),
    "awq_one_group": _awq(-1),
    "nf4": _bitsandbytes("nf4"),
    "nf4_double": _bitsandbytes("nf4", double=True),
    "fp4": _bitsandbytes("fp4"),
    "fp4_double": _bitsandbytes("fp4", double=True),
    "bitsandbytes_int8": (_pack_bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "w4a16": _compressed_integers(4),
    "w4a16_asymmetric": _compressed_integers(4, symmetric=False),
    "w4a16_act_order": _compressed_integers(4, act_order=True),
    "w4a16_rows": _compressed_integers(4, size=-1),
    "w8a16": _compressed_integers(8),
    "w8a16_act_order": _compressed_integers(8, act_order=True, symmetric=False),
    "w8a8": (_pack_rows_int8, _compressed(8, "int", "int-quantized", strategy="channel")),
    "w8a8_asymmetric": (_pack_rows_int8_with_zeros, _compressed(8, "int", "int-quantized", strategy="channel")),
    "w8a8_fp8": (_pack_whole_fp8, _compressed(8, "float", "naive-quantized", strategy="tensor")),
    "w8a8_fp8_blocks": (
        _pack_compressed_blocks_fp8,
        _compressed(8, "float", "float-quantized", strategy="block", block_structure=[BLOCK, BLOCK]),
    ),
    "fp8_rows": (_pack_rows_fp8, _compressed(8, "float", "float-quantized", strategy="channel")),
    "fp8_whole": (_pack_whole_fp8, _DYNAMIC_FP8),
    "fp8_blocks": (_pack_blocks_fp8, _DYNAMIC_FP8 | {"weight_block_size": [BLOCK, BLOCK]}),
    "fbgemm": (_pack_rows_fp8, {"quant_method": "fbgemm_fp8"}),
    "mxfp4": (_pack_mxfp4, {"quant_method": "mxfp4"}),
}
