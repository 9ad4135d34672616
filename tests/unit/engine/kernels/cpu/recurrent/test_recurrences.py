"""Recurrences in C++ against those in plain torch, on passes with rows that decode, chunks, drafts and snapshots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from tgi_server.engine.backends import recurrent
from tgi_server.engine.kernels import load_kernels

TOKENS, SLOTS = 90, 7
# Two rows that decode, a chunk of several tiles, one of drafted tokens, a short one. A snapshot is taken behind 40 and
# behind all tokens of the first chunk.
RUNS = [(0, 1, 1, 1), (1, 1, 2, 1), (2, 70, 3, 1), (72, 5, 4, 0), (77, 13, 5, 1)]
SAVES = [(2, 40, 6), (2, 70, 0)]

Reference = Callable[..., tuple[Tensor, Tensor]]
# Takes the arguments of the function of `transformers`, [1, tokens, ...] each; and states, runs and saves.
Kernel = Callable[[dict[str, Any], Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


class Case:
    """A function, its arguments for a pass, and which of them have something for each token, in dimension `dim`."""

    def __init__(
        self, kernel: Kernel, reference: Reference, arguments: dict[str, Any], inputs: list[str], dim: int
    ) -> None:
        self.kernel, self.reference, self.arguments, self.inputs, self.dim = kernel, reference, arguments, inputs, dim

    def of(self, first: int, tokens: int) -> dict[str, Any]:
        own = {name: self.arguments[name].narrow(self.dim, first, tokens) for name in self.inputs}
        return self.arguments | own

    def compute(
        self,
        runs: list[tuple[int, ...]],
        saves: list[tuple[int, ...]],
        states: Tensor,
        first: int = 0,
        tokens: int = TOKENS,
    ) -> Tensor:
        places = torch.tensor(runs), torch.tensor(saves, dtype=torch.int64).view(-1, 3)
        return self.kernel(self.of(first, tokens), states, *places)


def run_convolution(of: dict[str, Any], states: Tensor, runs: Tensor, saves: Tensor) -> Tensor:
    taps, bias = of["weight"].float().t().contiguous(), of["bias"]
    x, activate = of["hidden_states"][0].t(), of["activation"] is not None
    bias = None if bias is None else bias.float()
    return torch.ops.oatmill.convolve(x, taps, bias, states, runs, saves, activate).t().unsqueeze(0)


def run_delta_rule(of: dict[str, Any], states: Tensor, runs: Tensor, saves: Tensor) -> Tensor:
    query, key, value = (of[name][0] for name in ("query", "key", "value"))
    gates, rates = (of[name][0].float().contiguous() for name in ("g", "beta"))
    return torch.ops.oatmill.delta_rule(query, key, value, gates, rates, states, runs, saves, True).unsqueeze(0)


def run_mamba2(of: dict[str, Any], states: Tensor, runs: Tensor, saves: Tensor) -> Tensor:
    x, into, out_of, steps = (of[name][0] for name in ("hidden_states", "B", "C", "dt"))
    skip, bias = (None if of[name] is None else of[name].float() for name in ("D", "dt_bias"))
    places = states, runs, saves
    limits = of["dt_limit"]
    return torch.ops.oatmill.mamba2(x, steps, of["A"], into, out_of, skip, bias, *places, True, *limits).unsqueeze(0)


def run_mamba(of: dict[str, Any], states: Tensor, runs: Tensor, saves: Tensor) -> Tensor:
    x, into, out_of = (of[name][0].t() for name in ("hidden_states", "B", "C"))
    steps = torch.nn.functional.softplus(of["dt"] + of["delta_bias"].to(of["dt"].dtype)[..., None])[0].t().contiguous()
    gates = None if of["z"] is None else of["z"][0].t()
    rates = of["A"].t().contiguous()
    places = states, runs, saves
    return torch.ops.oatmill.mamba(x, steps, rates, into, out_of, of["D"], gates, *places).t().unsqueeze(0)


def convolution(dtype: torch.dtype, *, bias: bool = True, activation: str | None = "silu", channels: int = 300) -> Case:
    arguments = {
        "hidden_states": torch.randn(1, TOKENS, channels, dtype=dtype).transpose(1, 2),
        "weight": torch.randn(channels, 4, dtype=dtype),
        "bias": torch.randn(channels, dtype=dtype) if bias else None,
        "activation": activation,
    }

    def reference(
        initial_state: Tensor, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> tuple[Tensor, Tensor]:
        taps, inputs = weight.float().t(), hidden_states.transpose(1, 2)
        output, state = recurrent.convolution(taps, bias, activation is not None, initial_state, inputs)
        return output.transpose(1, 2), state

    return Case(run_convolution, reference, arguments, ["hidden_states"], 2)


def delta(
    dtype: torch.dtype, *, by_channel: bool = False, size: int = 24, value_size: int = 40, heads: int = 4
) -> Case:
    mixed = torch.randn(1, TOKENS, 2 * 2 * size + heads * value_size, dtype=dtype)
    query, key, value = mixed.split([2 * size, 2 * size, heads * value_size], dim=-1)
    query, key = (each.unflatten(-1, (2, size)) for each in (query, key))
    if by_channel:
        query, key = (each.repeat_interleave(heads // 2, dim=2) for each in (query, key))
    gates = -torch.rand(1, TOKENS, heads, *(size,) * by_channel)
    arguments = {"query": query, "key": key, "value": value.unflatten(-1, (heads, value_size)), "g": gates}
    arguments |= {"beta": torch.rand(1, TOKENS, heads, dtype=dtype)}

    def reference(
        initial_state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunked = recurrent.KIMI_CHUNKS if by_channel else recurrent.CHUNKS
        return recurrent.delta_rule(chunked, initial_state, query, key, value, g, beta)

    return Case(run_delta_rule, reference, arguments, ["query", "key", "value", "g", "beta"], 1)


def mamba2(dtype: torch.dtype, *, bias: bool = True, size: int = 20, columns: int = 24) -> Case:
    heads, groups = 4, 2
    arguments = {
        "hidden_states": torch.randn(1, TOKENS, heads, columns, dtype=dtype),
        "dt": torch.randn(1, TOKENS, heads, dtype=dtype),
        "A": -torch.rand(heads) - 0.1,
        "B": torch.randn(1, TOKENS, groups, size, dtype=dtype),
        "C": torch.randn(1, TOKENS, groups, size, dtype=dtype),
        "D": torch.randn(heads, dtype=dtype) if bias else None,
        "dt_bias": torch.randn(heads, dtype=dtype) if bias else None,
        "dt_softplus": True,
        "dt_limit": (0.01, 1.5),
        "chunk_size": 16,
        "return_final_states": True,
    }

    def reference(initial_state: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        output, state = mamba2_chunk_scan(initial_states=initial_state.transpose(2, 3), **arguments)
        return output, state.transpose(2, 3)

    return Case(run_mamba2, reference, arguments, ["hidden_states", "dt", "B", "C"], 1)


def mamba(dtype: torch.dtype, *, gated: bool = True, channels: int = 72, size: int = 6) -> Case:
    arguments = {
        "hidden_states": torch.randn(1, TOKENS, channels, dtype=dtype).transpose(1, 2),
        "dt": torch.randn(1, channels, TOKENS, dtype=dtype),
        "A": -torch.rand(channels, size) - 0.1,
        "B": torch.randn(1, TOKENS, size, dtype=dtype).transpose(1, 2),
        "C": torch.randn(1, TOKENS, size, dtype=dtype).transpose(1, 2),
        "D": torch.randn(channels),
        "z": torch.randn(1, TOKENS, channels, dtype=dtype).transpose(1, 2) if gated else None,
        "delta_bias": torch.randn(channels),
        "delta_softplus": True,
    }

    def reference(initial_state: Tensor, **of: Any) -> tuple[Tensor, Tensor]:
        # [texts, parts, size, columns] of the kernel, [texts, channels, size] here.
        parts = initial_state.shape[1]
        steps = torch.nn.functional.softplus(of["dt"] + of["delta_bias"].to(dtype)[:, None])
        inputs = (each.transpose(1, 2) for each in (of["hidden_states"], steps, of["B"], of["C"]))
        state = initial_state.transpose(2, 3).flatten(1, 2)
        scanned, state = recurrent.mamba_scan(of["A"], state, *inputs)
        output = scanned.transpose(1, 2) + of["hidden_states"] * of["D"][:, None]
        if of["z"] is not None:
            output = output * torch.nn.functional.silu(of["z"])
        return output, state.unflatten(1, (parts, -1)).transpose(2, 3)

    inputs = ["hidden_states", "dt", "B", "C", *["z"] * gated]
    return Case(run_mamba, reference, arguments, inputs, 2)


KINDS = {
    "convolution": (convolution, (3, 300)),
    "convolution alone": (lambda dtype: convolution(dtype, bias=False, activation=None, channels=37), (3, 37)),
    "delta rule": (delta, (4, 24, 40)),
    "delta rule of whole registers": (lambda dtype: delta(dtype, size=32, value_size=96), (4, 32, 96)),
    "delta rule of odd sizes": (lambda dtype: delta(dtype, size=19, value_size=7), (4, 19, 7)),
    "Kimi's rule": (lambda dtype: delta(dtype, by_channel=True), (4, 24, 40)),
    "Mamba-2": (mamba2, (4, 20, 24)),
    "Mamba-2 of odd sizes": (lambda dtype: mamba2(dtype, bias=False, size=5, columns=65), (4, 5, 65)),
    "Mamba": (mamba, (8, 6, 9)),
    "Mamba without a gate": (lambda dtype: mamba(dtype, gated=False, channels=36, size=4), (4, 4, 9)),
}


def states_for(name: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(SLOTS, *KINDS[name][1], dtype=dtype if name.startswith("conv") else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_computes_what_plain_torch_does(name: str, dtype: torch.dtype) -> None:
    case, states = KINDS[name][0](dtype), states_for(name, dtype)
    before = states.clone()
    output = case.compute(RUNS, SAVES, states)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    kept = {4: before[4]}
    for first, tokens, slot, written in RUNS:
        expected, state = case.reference(initial_state=before[slot : slot + 1].clone(), **case.of(first, tokens))
        torch.testing.assert_close(output.narrow(case.dim, first, tokens), expected.to(output.dtype), **close)
        if written:
            kept[slot] = state[0].to(states.dtype)
    kept[0] = kept[3]
    kept[6] = case.reference(initial_state=before[3:4].clone(), **case.of(2, 40))[1][0].to(states.dtype)
    for slot, state in kept.items():
        torch.testing.assert_close(states[slot], state, **close, msg=f"slot {slot}")


@pytest.mark.parametrize("name", KINDS)
def test_a_text_has_the_same_bits_however_it_is_cut_and_whatever_is_beside_it(name: str) -> None:
    dtype = torch.bfloat16
    case, states = KINDS[name][0](dtype), states_for(name, dtype)
    alone = states.clone()
    output = case.compute(RUNS, SAVES, states)
    threads = torch.ops.oatmill.set_own_threads(3)
    pieces = []
    for tokens in (1, 1, 33, 4, 31):
        first = 2 + sum(each.shape[case.dim] for each in pieces)
        pieces.append(case.compute([(0, tokens, 3, 1)], [], alone, first, tokens))
    torch.ops.oatmill.set_own_threads(threads)
    assert torch.equal(torch.cat(pieces, case.dim), output.narrow(case.dim, 2, 70))
    assert torch.equal(alone[3], states[3])
    assert torch.equal(states[0], states[3])


def test_runs_that_do_not_fit_are_refused() -> None:
    case, states = delta(torch.float32), states_for("delta rule", torch.float32)
    for runs, saves in (([(0, 1, SLOTS, 1)], []), ([(85, 6, 1, 1)], []), ([(0, 4, 1, 1)], [(0, 5, 2)])):
        with pytest.raises(RuntimeError):
            case.compute(runs, saves, states)
