"""Mixers without keys (gated delta nets, Mamba, short convolutions) on packed batches, with the states of their slots.

A mixer of `transformers` projects its input, convolves it over time, and runs a recurrence. Only the last two look at
other tokens, and they are functions of the mixer's module, called by name. So a mixer's own forward is run here with
other functions under these names: they compute each sequence of a pass alone, from the state in its slot on, in plain
torch. Models with a spec do all this in kernels (`mixer_kernels.py`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.attention.base import ForwardMetadata
from tgi_server.engine.backends.attention.paged_cache import PagedCache
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
    state.
    """

    inputs: tuple[str, ...]
    dim: int = 1
    state: str = "initial_state"
    few: _Run | None = None
    substitute: _Run | None = None
    chunk_size: int | None = None
    output_only: bool = False


_DELTA_RULE = ("query", "key", "value", "g", "beta")
_RECURRENCES = {
    "causal_conv1d_fn": _Recurrence(("hidden_states",), dim=2, substitute=causal_convolution, output_only=True),
    "torch_chunk_gated_delta_rule": _Recurrence(_DELTA_RULE, few=delta_rule, chunk_size=64),
    "chunk_kimi_delta_attention": _Recurrence(_DELTA_RULE, few=delta_rule, chunk_size=64),
    "mamba2_chunk_scan": _Recurrence(("hidden_states", "dt", "B", "C"), state="initial_states"),
    "mamba_selective_scan": _Recurrence(("hidden_states", "dt", "B", "C", "z"), dim=2, substitute=selective_scan),
}


def install_packed_mixers(model: nn.Module) -> Callable[[], None]:
    """Makes the mixers of a model compute packed batches, by their modules' `paged_cache`. Returns an undo function."""
    mixers = [module for module in model.modules() if _functions_of(module) and hasattr(module, "layer_idx")]
    for mixer in mixers:
        mixer.forward = _packed_forward(mixer)

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


def _packed(mixer: nn.Module, name: str, functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function for packed batches that has the arguments of one of the mixer's module."""
    recurrence = _RECURRENCES[name]
    own = inspect.unwrap(functions[name])
    signature = inspect.signature(own)
    part = int(mixer.layer_idx), name  # type: ignore[arg-type]
    function: _Run = recurrence.substitute or own

    def compute(*positional: Any, **named: Any) -> Any:
        cache: PagedCache = mixer.paged_cache  # type: ignore[assignment]
        assert cache.metadata is not None
        assert cache.states is not None
        arguments = signature.bind(*positional, **named).arguments
        arguments |= arguments.pop("kwargs", {})
        arguments.pop(recurrence.state, None)
        inputs = {each: arguments.pop(each) for each in recurrence.inputs if arguments.get(each) is not None}
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
