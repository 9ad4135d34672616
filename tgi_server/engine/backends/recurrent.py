"""Layers with states (gated delta nets, Mamba, short convolutions) in plain torch, between their projections.

Each sequence of a pass continues from the state in its slot. `kernels/cpu/recurrent/` computes the same. `of`: the
arguments of a recipe of `mixer_kernels.py`.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tgi_server.engine.backends.attention.base import ForwardMetadata
from tgi_server.engine.backends.lora import AdapterRows
from tgi_server.engine.backends.mixer_kernels import MixerKernel
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.parallel.layers import ShardedGatedNorm

# A chunk of more tokens is computed by the functions of `transformers`, which take several tokens at a time.
_FEW_TOKENS = 8

# The functions of the gated delta rule and of Kimi's.
CHUNKS = "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
KIMI_CHUNKS = "kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"

# Takes the state before the first token, or None for zeros, and tensors, [texts, tokens, ...]; returns the outputs,
# likewise, and the state after the last token.
_Run = Callable[..., tuple[Tensor, Tensor]]


def mix(
    mixer: MixerKernel, projected: Tensor, metadata: ForwardMetadata, states: SequenceStates, rows: AdapterRows | None
) -> Tensor:
    """Returns the input of a mixer's last projection, [tokens, features]. projected: the outputs of the first ones."""
    name, arguments = mixer.recipe
    return _MIXERS[name](_Texts(mixer.layer, metadata, states, rows), projected, arguments)


class _Texts:
    """The sequences of a pass, with their states of one layer. rows: the rows with adapters; None: there are none."""

    def __init__(self, layer: int, metadata: ForwardMetadata, states: SequenceStates, rows: AdapterRows | None) -> None:
        self._layer, self._metadata, self._states = layer, metadata, states
        self.rows = rows

    def run(self, name: str, function: _Run, *inputs: Tensor) -> Tensor:
        """Computes all decoding rows together and prompt chunks one by one. Returns the output, [tokens, ...].

        name: the state's name. inputs: [tokens, ...].
        """
        metadata, states, key = self._metadata, self._states, (self._layer, name)
        outputs, rows = [], metadata.decoding
        if rows:
            slots = metadata.row_slots
            assert slots is not None
            output, state = function(states.read(key, slots), *(tensor[:rows].unsqueeze(1) for tensor in inputs))
            states.write(key, slots, state)
            outputs.append(output.squeeze(1))
        for chunk, slot in zip(metadata.chunks, metadata.state_slots[rows:], strict=True):
            tokens = [tensor[chunk.start : chunk.start + chunk.length].unsqueeze(0) for tensor in inputs]
            row, begin = slice(slot, slot + 1), 0
            if chunk.drafted:
                before = states.read(key, row)
                outputs.append(function(None if before is None else before.clone(), *tokens)[0].squeeze(0))
                states.draft(slot, partial(_advance, function, tokens, key, row, states))
                continue
            for end, snapshot in (*chunk.saves, (chunk.length, None)):
                if begin < end:
                    output, state = function(states.read(key, row), *(tensor[:, begin:end] for tensor in tokens))
                    states.write(key, row, state)
                    outputs.append(output.squeeze(0))
                    begin = end
                if snapshot is not None:
                    target = states.slot_of(snapshot)
                    states.write(key, slice(target, target + 1), state)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _advance(
    function: _Run, inputs: list[Tensor], key: tuple[int, str], row: slice, states: SequenceStates, tokens: int
) -> None:
    """Advances a state by the first `tokens` tokens of some inputs."""
    states.write(key, row, function(states.read(key, row), *(tensor[:, :tokens] for tensor in inputs))[1])


def _delta_net(texts: _Texts, projected: Tensor, of: tuple[Any, ...]) -> Tensor:
    """Computes a gated delta net (Yang et al., 2024). grouped: outputs of projections are ordered by key head."""
    key_heads, grouped, taps, rates, bias, rate_scale, weight, eps = of
    heads, size = len(rates), len(weight)
    of_values, mixed = heads * size, taps.shape[1]
    of_keys = (mixed - of_values) // 2
    if grouped:
        share, key_size = heads // key_heads, of_keys // key_heads
        joined, steps = projected.split((mixed + of_values, 2 * heads), 1)
        parts = joined.unflatten(1, (key_heads, -1)).split((key_size, key_size, share * size, share * size), 2)
        *inputs, gate = (tensor.flatten(1) for tensor in parts)
        x = torch.cat(inputs, 1)
        beta, step = (tensor.flatten(1) for tensor in steps.unflatten(1, (key_heads, -1)).chunk(2, 2))
    else:
        x, gate, beta, step = projected.split((mixed, of_values, heads, heads), 1)
    x = texts.run("convolution", partial(convolution, taps, None, True), x)
    query, key, value = x.split((of_keys, of_keys, of_values), 1)
    decay = rates * softplus(step.float() + bias)
    output = texts.run(
        "delta rule",
        partial(delta_rule, CHUNKS),
        query.unflatten(1, (key_heads, -1)),
        key.unflatten(1, (key_heads, -1)),
        value.unflatten(1, (heads, size)),
        decay,
        beta.sigmoid() * rate_scale,
    )
    return (_normed(output, weight, eps) * silu(gate.float()).view(output.shape)).to(projected.dtype).flatten(1)


def _kimi(texts: _Texts, projected: Tensor, of: tuple[Any, ...]) -> Tensor:
    """Computes Kimi's delta attention (arXiv:2510.26692): each element of a key decays by a rate of its own."""
    taps, forget, gates, rates, bias, weight, eps = of
    mixed, size, heads = taps.shape[1], len(weight), len(rates)
    x, forgetting, gating, beta = projected.split((mixed, forget.in_features, gates.in_features, heads), 1)
    x = texts.run("convolution", partial(convolution, taps, None, True), x)
    query, key, value = x.unflatten(1, (3, heads, size)).unbind(1)
    step = softplus(forget.adapted(forgetting.contiguous(), texts.rows).float() + bias).view(-1, heads, size)
    inputs = query, key, value, rates[:, None] * step, beta.sigmoid()
    output = texts.run("delta rule", partial(delta_rule, KIMI_CHUNKS), *inputs)
    gate = gates.adapted(gating.contiguous(), texts.rows).float().sigmoid().view(output.shape)
    return (_normed(output, weight, eps) * gate).to(projected.dtype).flatten(1)


def _mamba2(texts: _Texts, projected: Tensor, of: tuple[Any, ...]) -> Tensor:
    """Computes Mamba-2 (Dao and Gu, 2024), with a gate and a norm of groups of elements, or with a gate alone."""
    taps, taps_bias, rates, skip, bias, least, most, weight, eps, group, gate_first, groups = of
    heads, mixed = len(rates), taps.shape[1]
    inner = projected.shape[1] - mixed - heads
    gate, x, step = projected.split((inner, mixed, heads), 1)
    x = texts.run("convolution", partial(convolution, taps, taps_bias, True), x)
    x, into, out_of = x.split((inner, (mixed - inner) // 2, (mixed - inner) // 2), 1)
    inputs = x.unflatten(1, (heads, -1)), step, into.unflatten(1, (groups, -1)), out_of.unflatten(1, (groups, -1))
    output = texts.run("scan", partial(_mamba2_scan, rates, skip, bias, (least, most)), *inputs).flatten(1)
    if weight is None:
        return output * silu(gate)
    if isinstance(weight, ShardedGatedNorm):  # of groups that several shards have parts of
        normed: Tensor = weight(output, gate)
        return normed
    values, gates = output.float(), silu(gate.float())
    normal = (values * gates if gate_first else values).unflatten(1, (-1, group))
    normal = (normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + eps)).flatten(1) * weight
    return (normal if gate_first else normal * gates).to(projected.dtype)


def _mamba(texts: _Texts, projected: Tensor, of: tuple[Any, ...]) -> Tensor:
    """Computes Mamba (Gu and Dao, 2023) as Jamba has it, with norms of the input of `steps`, B and C."""
    taps, taps_bias, inner, norms, eps, steps, bias, rates, skip = of
    x, gate = projected.split(taps.shape[1], 1)
    x = texts.run("convolution", partial(convolution, taps, taps_bias, True), x)
    size = len(rates)
    chosen = inner.adapted(x, texts.rows)
    parts = chosen.split((chosen.shape[1] - 2 * size, size, size), 1)
    step, into, out_of = (_normed(part, norm.float(), eps).to(x.dtype) for part, norm in zip(parts, norms, strict=True))
    step = softplus(steps(step) + bias)
    output = texts.run("scan", partial(mamba_scan, rates.T), x, step, into, out_of)
    return ((output + x * skip) * silu(gate)).to(projected.dtype)


def _short_convolution(texts: _Texts, projected: Tensor, of: tuple[Any, ...]) -> Tensor:
    """Computes a convolution between gates (LFM2)."""
    taps, bias = of
    before, after, x = projected.chunk(3, 1)
    return after * texts.run("convolution", partial(convolution, taps, bias, False), before * x)


_MIXERS: dict[str, Callable[..., Tensor]] = {
    "gated_delta_net": _delta_net,
    "kimi_delta_attention": _kimi,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "short_convolution": _short_convolution,
}


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x, [..., size], divided by its root mean square and times weight, in float32."""
    values = x.float()
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight


def convolution(
    taps: Tensor,
    bias: Tensor | None,
    activated: bool,
    state: Tensor | None,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolves each channel over its last inputs. taps: [width, channels]. x: [texts, tokens, channels].

    state: the last inputs before these, [texts, width - 1, channels].
    """
    before, tokens = len(taps) - 1, x.shape[1]
    inputs = torch.cat([x.new_zeros(len(x), before, x.shape[2]) if state is None else state, x], 1)
    # A sum over the few taps: torch's convolution of many channels, each by itself, takes several times as long.
    wide = inputs.float()
    convolved = sum(
        (wide[:, tap : tap + tokens] * taps[tap] for tap in range(1, before + 1)), wide[:, :tokens] * taps[0]
    )
    if bias is not None:
        convolved = convolved + bias
    convolved = convolved.to(x.dtype)
    return silu(convolved) if activated else convolved, inputs[:, tokens:]


def delta_rule(
    chunked: tuple[str, str],
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule. chunked: the function of `transformers` for many tokens.

    query, key: [texts, tokens, key_heads, size]. value: [texts, tokens, heads, value_size]. beta: [texts, tokens,
    heads]. decay: the same, or [texts, tokens, heads, size]. state: [texts, heads, size, value_size].
    """
    tokens = value.shape[1]
    if tokens > _FEW_TOKENS:
        output, state = _of_transformers(*chunked)(
            query, key, value, g=decay, beta=beta, chunk_size=min(64, tokens), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return output, state.float()
    heads, size = value.shape[2], key.shape[3]
    if state is None:
        state = value.new_zeros(len(value), heads, size, value.shape[3], dtype=torch.float32)
    query, key = (_of_length_1(each.float()).repeat_interleave(heads // each.shape[2], dim=2) for each in (query, key))
    query = query * size**-0.5
    kept = decay.float().exp()
    kept = kept[..., None, None] if kept.dim() == 3 else kept[..., None]
    outputs = []
    for token in range(tokens):
        state = state * kept[:, token]
        known = torch.einsum("thk,thkv->thv", key[:, token], state)
        change = (value[:, token].float() - known) * beta[:, token, :, None].float()
        state = state + key[:, token, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("thk,thkv->thv", query[:, token], state))
    return torch.stack(outputs, 1).to(value.dtype), state


def _mamba2_scan(
    rates: Tensor,
    skip: Tensor,
    bias: Tensor,
    limits: tuple[float, float],
    state: Tensor | None,
    x: Tensor,
    step: Tensor,
    into: Tensor,
    out_of: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scans as Mamba-2 does. rates, skip, bias: [heads] float32. x: [texts, tokens, heads, size].

    step: [texts, tokens, heads]. into, out_of: [texts, tokens, groups, states]. state: [texts, heads, size, states].
    """
    heads, tokens = len(rates), x.shape[1]
    if tokens > _FEW_TOKENS:
        scan = _of_transformers("bamba.modeling_bamba", "mamba2_chunk_scan")
        output, state = scan(
            x, step, rates, into, out_of, chunk_size=min(256, tokens), D=skip, dt_bias=bias, dt_softplus=True,
            initial_states=state, dt_limit=limits, return_final_states=True,
        )  # fmt: skip
        return output.view(x.shape), state.float()
    steps = softplus(step.float() + bias).clamp(*limits)
    into, out_of = (each.float().repeat_interleave(heads // each.shape[2], 2) for each in (into, out_of))
    outputs = []
    for token in range(tokens):
        given = x[:, token].float() * steps[:, token, :, None]
        kept = 0 if state is None else state * (steps[:, token] * rates).exp()[..., None, None]
        state = given[..., None] * into[:, token, :, None] + kept
        outputs.append((state @ out_of[:, token, :, :, None]).squeeze(-1))
    assert state is not None
    return (torch.stack(outputs, 1) + x.float() * skip[:, None]).to(x.dtype), state


def mamba_scan(
    rates: Tensor, state: Tensor | None, x: Tensor, step: Tensor, into: Tensor, out_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Scans as Mamba does. rates: [channels, states]. x, step: [texts, tokens, channels].

    into, out_of: [texts, tokens, states]. state: [texts, channels, states].
    """
    steps, into, out_of = step.float(), into.float(), out_of.float()
    given, outputs = steps * x.float(), []
    for token in range(x.shape[1]):
        kept = 0 if state is None else state * (steps[:, token, :, None] * rates).exp()
        state = given[:, token, :, None] * into[:, token, None] + kept
        outputs.append((state @ out_of[:, token, :, None]).squeeze(-1))
    assert state is not None
    return torch.stack(outputs, 1), state


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _of_transformers(module: str, name: str) -> Any:
    """Returns a function of `transformers` in plain torch, never a kernel of another library that may replace it."""
    return inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{module}"), name))
