"""Layers with states that the CPU's kernels compute in one call, with their projections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.backends.recurrent import Runs
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.linear import PackedLinear

# Shape and dtype of one slot's states, by the name of the function that has them; None: the dtype of the model.
_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]


@dataclass(frozen=True, slots=True)
class _Family:
    """The parts of a layer of some families.

    linears: names of its projections. make: makes its kernel, of the mixer and the kernels of its projections. states:
    of a mixer, in the order in which the kernel takes them.
    """

    linears: tuple[str, ...]
    make: Callable[[Any, list[Any]], Any]
    states: Callable[[Any], _Shapes]


def are_plain(linears: Sequence[Any]) -> bool:
    """Returns True if linear layers have kernels, and nothing changes what these compute, as adapters' hooks do."""
    return not any(
        each._forward_hooks or not isinstance(each, PackedLinear) or each.kernel() is None for each in linears
    )


class LayerKernel:
    """Computes one layer of a family above."""

    def __init__(self, mixer: Any, family: _Family) -> None:
        self._mixer = mixer
        self._family = family
        self._kernel: Any = None

    @classmethod
    def of(cls, mixer: Any) -> "LayerKernel | None":
        """Returns the kernel of a mixer of `transformers`; None if there is none."""
        family = _FAMILIES.get(type(mixer).__name__)
        return None if family is None or getattr(mixer, "activation", "silu") != "silu" else cls(mixer, family)

    def __call__(self, states: SequenceStates, x: Tensor, runs: Runs) -> Tensor | None:
        """Computes the layer; None if its projections are not packed, or adapters change them.

        x: [1, tokens, hidden_size]. Returns a tensor of this shape.
        """
        linears = [getattr(self._mixer, name) for name in self._family.linears]
        if not are_plain(linears):
            return None
        if self._kernel is None:
            self._kernel = self._family.make(self._mixer, [each.kernel() for each in linears])
        layer = int(self._mixer.layer_idx)
        slots = [
            states.all_slots((layer, name), shape, dtype or x.dtype)
            for name, (shape, dtype) in self._family.states(self._mixer).items()
        ]
        computed: Tensor = self._kernel.forward(x[0], *slots, runs.runs, runs.saves)
        return computed.unsqueeze(0)


def _mamba2(mixer: Any, linears: list[Any]) -> Any:
    norm, (least, most) = mixer.norm, mixer.time_step_limit
    return torch.classes.oatmill.Mamba2Layer(
        *linears,
        *_convolution(mixer.conv1d),
        -mixer.A_log.float().exp(),
        mixer.D.float(),
        mixer.dt_bias.float(),
        float(least),
        float(most),
        norm.weight.float(),
        norm.variance_epsilon,
        norm.group_size,
        mixer.n_groups,
    )


def _states_of_mamba2(mixer: Any) -> _Shapes:
    recurrent = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
    return _states_of_convolution(mixer.conv1d) | {"mamba2_chunk_scan": (recurrent, torch.float32)}


def _short_convolution(mixer: Any, linears: list[Any]) -> Any:
    return torch.classes.oatmill.ShortConvolution(*linears, *_convolution(mixer.conv))


def _convolution(module: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the taps, [width, channels], and the bias of a convolution."""
    taps = module.weight.squeeze(1).float().t().contiguous()
    return taps, None if module.bias is None else module.bias.float()


def _states_of_convolution(module: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    channels, _, width = module.weight.shape
    return {"causal_conv1d_fn": ((width - 1, channels), None)}


_MAMBA2 = _Family(("in_proj", "out_proj"), _mamba2, _states_of_mamba2)
_SHORT = _Family(("in_proj", "out_proj"), _short_convolution, lambda mixer: _states_of_convolution(mixer.conv))
# By the name of the mixer's class in `transformers`.
_FAMILIES = {
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Lfm2ShortConv": _SHORT,
    "Lfm2MoeShortConv": _SHORT,
}
