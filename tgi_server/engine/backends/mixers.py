"""Mixers without keys (gated delta nets, Mamba, short convolutions) on packed batches, with the states of their slots.

A mixer of `transformers` projects its input, convolves it over time, and runs a recurrence. Only the last two look at
other tokens, and they are functions of the mixer's module, called by name. So a mixer's own forward is run here with
other functions under these names: they compute each sequence of a pass alone, from the state in its slot on, in plain
torch or in the CPU's kernels (`recurrent.py`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.attention.base import ForwardMetadata
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.mixer_kernels import MixerKernel
from tgi_server.engine.backends.recurrent import (
    Convolution,
    DeltaRule,
    KernelFunction,
    Mamba,
    Mamba2,
    Runs,
    StatesOf,
)
from tgi_server.engine.backends.states import Part, SequenceStates, causal_convolution, delta_rule, selective_scan

# A chunk of up to this many tokens is computed one token after the other where there is a function for that.
_FEW_TOKENS = 8

# Takes tensors by name; returns the outputs and the state behind them.
_Run = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """A function over the tokens of a text.

    inputs: arguments with something for each token, which stands in dimension `dim`, as in the output. state: the
    argument that is the state before the first token. few: a function of the same arguments that is faster for few
    tokens; it may change the state that it gets. substitute: what is computed in its place; None: the function itself,
    in plain torch. chunk_size: of one that computes chunks, where it is not an argument. output_only: it returns no
    state. kernel: makes what computes it in the CPU's kernels.
    """

    kernel: Callable[[], KernelFunction]
    inputs: tuple[str, ...]
    dim: int = 1
    state: str = "initial_state"
    few: _Run | None = None
    substitute: _Run | None = None
    chunk_size: int | None = None
    output_only: bool = False


_DELTA_RULE = ("query", "key", "value", "g", "beta")
_RECURRENCES = {
    "causal_conv1d_fn": _Recurrence(
        Convolution, ("hidden_states",), dim=2, substitute=causal_convolution, output_only=True
    ),
    "torch_chunk_gated_delta_rule": _Recurrence(DeltaRule, _DELTA_RULE, few=delta_rule, chunk_size=64),
    "chunk_kimi_delta_attention": _Recurrence(DeltaRule, _DELTA_RULE, few=delta_rule, chunk_size=64),
    "mamba2_chunk_scan": _Recurrence(Mamba2, ("hidden_states", "dt", "B", "C"), state="initial_states"),
    "mamba_selective_scan": _Recurrence(
        Mamba, ("hidden_states", "dt", "B", "C", "z"), dim=2, substitute=selective_scan
    ),
}


def install_packed_mixers(model: nn.Module) -> Callable[[], None]:
    """Makes the mixers of a model compute packed batches, by their modules' `paged_cache`. Returns an undo function."""
    mixers = [module for module in model.modules() if _functions_of(module) and hasattr(module, "layer_idx")]
    for mixer in mixers:
        mixer.forward = _with_kernels(mixer, _packed_forward(mixer))

    def restore() -> None:
        for mixer in mixers:
            del mixer.forward

    return restore


def has_mixers(model: nn.Module) -> bool:
    """Returns True if packed mixers are installed."""
    return any("forward" in vars(module) and _functions_of(module) for module in model.modules())


def _functions_of(module: nn.Module) -> set[str]:
    """Returns the names of the functions over tokens that a module calls."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else _RECURRENCES.keys() & set(code.co_names)


def _packed_forward(mixer: nn.Module) -> MethodType:
    """Returns the mixer's own forward with packed functions in the place of those over tokens."""
    own: Any = inspect.unwrap(type(mixer).forward)
    packed = {name: _packed(mixer, name, own.__globals__) for name in _functions_of(mixer)}
    forward = FunctionType(own.__code__, {**own.__globals__, **packed}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, mixer)


def _with_kernels(mixer: Any, packed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a forward pass that calls the kernel of the whole mixer, where there is one. packed: does without."""
    kernel_of = cache(partial(MixerKernel.of, mixer))  # when the kernels are loaded

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        places: PagedCache = mixer.paged_cache
        metadata, states = places.metadata, places.states
        assert metadata is not None
        assert states is not None
        kernel = kernel_of() if states.in_kernels else None
        if kernel is None:
            return packed(hidden_states, *others, **named)
        if factor := getattr(mixer, "ssm_in_multiplier", None):  # of Falcon-H1
            hidden_states = hidden_states * factor
        parts = [mixer.get_submodule(name)(hidden_states) for name in kernel.projections]
        x = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        if (factors := getattr(mixer, "mup_vector", None)) is not None:
            x = x * factors
        projected = {"x": x}
        computed = _compute_in_kernel(partial(kernel.compute, states), 1, projected, metadata, states)
        output: Tensor = getattr(mixer, kernel.output)(computed.to(hidden_states.dtype))
        return output

    return forward


def _packed(mixer: nn.Module, name: str, functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function for packed batches that has the arguments of one of the mixer's module."""
    recurrence = _RECURRENCES[name]
    own = inspect.unwrap(functions[name])
    signature = inspect.signature(own)
    part = int(mixer.layer_idx), name  # type: ignore[arg-type]
    function: _Run = recurrence.substitute or own
    kernel = recurrence.kernel()

    def compute(*positional: Any, **named: Any) -> Any:
        cache: PagedCache = mixer.paged_cache  # type: ignore[assignment]
        assert cache.metadata is not None
        assert cache.states is not None
        arguments = signature.bind(*positional, **named).arguments
        arguments |= arguments.pop("kwargs", {})
        arguments.pop(recurrence.state, None)
        inputs = {each: arguments.pop(each) for each in recurrence.inputs if arguments.get(each) is not None}
        if cache.states.in_kernels and kernel.supports(arguments | inputs):
            run_kernel = partial(_run_kernel, kernel, arguments, partial(cache.states.all_slots, part))
            output = _compute_in_kernel(run_kernel, recurrence.dim, inputs, cache.metadata, cache.states)
        else:
            run = partial(_run, recurrence, function, arguments)
            output = _compute_packed(run, recurrence.dim, inputs, part, cache.metadata, cache.states)
        return output if recurrence.output_only else (output, output.new_empty(0))

    return compute


def _run(
    recurrence: _Recurrence,
    function: _Run,
    others: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes tokens of texts of the same length. others: arguments that tokens have in common."""
    arguments = {**others, **inputs, recurrence.state: state}
    tokens = next(iter(inputs.values())).shape[recurrence.dim]
    if recurrence.few is not None and tokens <= _FEW_TOKENS:
        return recurrence.few(**arguments)
    if chunk_size := others.get("chunk_size", recurrence.chunk_size):
        arguments["chunk_size"] = min(chunk_size, tokens)  # or it would be filled up
    return function(**arguments)


def _run_kernel(
    kernel: KernelFunction, others: Mapping[str, Any], states: StatesOf, inputs: Mapping[str, Tensor], runs: Runs
) -> Tensor:
    """Computes runs of tokens. others: arguments that tokens have in common."""
    return kernel({**others, **inputs}, states, runs)


def _compute_in_kernel(
    run: Callable[[Mapping[str, Tensor], Runs], Tensor],
    dim: int,
    inputs: Mapping[str, Tensor],
    metadata: ForwardMetadata,
    states: SequenceStates,
) -> Tensor:
    """Computes the sequences of a pass in one call. Takes and returns the same as `_compute_packed`."""
    output = run(inputs, metadata.made("runs", partial(Runs.of_pass, metadata, states)))
    for chunk, slot in zip(metadata.chunks, metadata.state_slots[metadata.decoding :], strict=True):
        if chunk.drafted:
            own = {name: each.narrow(dim, chunk.start, chunk.length) for name, each in inputs.items()}
            states.draft(slot, partial(_advance_in_kernel, run, dim, own, slot))
    return output


def _advance_in_kernel(
    run: Callable[[Mapping[str, Tensor], Runs], Tensor], dim: int, inputs: Mapping[str, Tensor], slot: int, tokens: int
) -> None:
    """Advances the state in a slot by the first `tokens` tokens of some inputs."""
    run({name: each.narrow(dim, 0, tokens) for name, each in inputs.items()}, Runs.of_text(tokens, slot))


def _compute_packed(
    run: Callable[[Mapping[str, Tensor], Tensor | None], tuple[Tensor, Tensor]],
    dim: int,
    inputs: Mapping[str, Tensor],
    part: Part,
    metadata: ForwardMetadata,
    states: SequenceStates,
) -> Tensor:
    """Computes the sequences of a pass, each from its state on: those that decode together, prompt chunks one by one.

    inputs: [1, ...], with the tokens of the pass in dimension `dim`. Returns the output likewise.
    """
    outputs = []
    rows = metadata.decoding
    if rows:
        slots = metadata.row_slots
        assert slots is not None
        output, state = run(
            {name: each.narrow(dim, 0, rows).transpose(0, dim) for name, each in inputs.items()},
            states.read(part, slots),
        )
        states.write(part, slots, state)
        outputs.append(output.transpose(0, dim))
    for chunk, slot in zip(metadata.chunks, metadata.state_slots[rows:], strict=True):
        own = {name: each.narrow(dim, chunk.start, chunk.length) for name, each in inputs.items()}
        place, begin = slice(slot, slot + 1), 0
        if chunk.drafted:
            before = states.read(part, place)
            outputs.append(run(own, None if before is None else before.clone())[0])
            states.draft(slot, partial(_advance, run, dim, own, part, place, states))
            continue
        for end, snapshot in (*chunk.saves, (chunk.length, None)):
            if begin < end:
                piece = {name: each.narrow(dim, begin, end - begin) for name, each in own.items()}
                output, state = run(piece, states.read(part, place))
                states.write(part, place, state)
                outputs.append(output)
                begin = end
            if snapshot is not None:
                target = states.slot_of(snapshot)
                states.write(part, slice(target, target + 1), state)
    return torch.cat(outputs, dim) if len(outputs) > 1 else outputs[0]


def _advance(
    run: Callable[[Mapping[str, Tensor], Tensor | None], tuple[Tensor, Tensor]],
    dim: int,
    inputs: Mapping[str, Tensor],
    part: Part,
    place: slice,
    states: SequenceStates,
    tokens: int,
) -> None:
    """Advances a state by the first `tokens` tokens of some inputs."""
    first = {name: each.narrow(dim, 0, tokens) for name, each in inputs.items()}
    states.write(part, place, run(first, states.read(part, place))[1])
