"""The experts of a mixture on a GPU, in two grouped GEMMs: the host need not know which token chose which expert."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_server.engine import proofs
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedLinear, QuantizedWeight
from tgi_server.engine.kernels.triton import device_fault, variants
from tgi_server.engine.parallel import ShardGroup, fault_of_any

logger = logging.getLogger(__name__)

# Compute capabilities of GPUs on which torch's `grouped_mm`, that of `transformers`, is one kernel, in bfloat16.
_GROUPED_MM = ((9, 0), (10, 0))
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
# Tokens of the proof, as multiples of the number of experts, one for each shape of a program; and for quantized weights
# that are dequantized first.
_TOKENS = (0.5, 9, 33)
_MANY_TOKENS = 65
# Experts that are packed together.
_PACKED_AT_ONCE = 16


def group_experts(model: nn.Module, dtype: torch.dtype, group: ShardGroup | None = None) -> list[str]:
    """Replaces the experts of mixtures on a GPU by ones that use the engine's own kernels.

    Dense experts only where torch's grouped GEMM would make the host wait, and with the variant `experts`; quantized
    ones, which stay quantized, always. Returns the fallbacks: why experts are computed in a slower way. All shards
    choose the same.
    """
    fallbacks = []
    dense: list[Any] = [module for module in model.modules() if Experts.fits(module)]
    quantized = [module for module in model.modules() if isinstance(module, Experts)]
    if dense and ("experts" in variants() or _waits(dense[0].down_proj)):
        fault = _fault_of(dense[0], GroupedExperts, dtype)
        fallbacks += _replaced(model, Experts.fits, GroupedExperts, fault_of_any(fault, group))
    if quantized:
        kind = partial(GroupedQuantizedExperts, dtype=dtype)
        fault = None if all(map(_joins, quantized)) else "those of a layer are quantized in groups of different sizes"
        fault = fault or _fault_of(quantized[0], kind, dtype)
        del quantized  # the list would keep the weights of all layers in memory until the last one is packed
        fallbacks += _replaced(model, lambda module: isinstance(module, Experts), kind, fault_of_any(fault, group))
    return fallbacks


def _replaced(
    model: nn.Module, fits: Callable[[nn.Module], bool], kind: Callable[[Any], nn.Module], fault: str | None
) -> list[str]:
    """Replaces the experts of all layers. If there is a fault it replaces none, and returns a fallback."""
    if fault is not None:
        fallback = f"experts are not multiplied by the engine's kernel, which is slow: {fault}"
        logger.warning(fallback)
        return [fallback]
    for path in [path for path, module in model.named_modules() if fits(module)]:
        model.set_submodule(path, kind(model.get_submodule(path)))
    return []


class Grouped(nn.Module):
    """Replaces a layer's experts.

    gated: between the two products there is a gate, not only an activation. activate: computes the gate or activation.
    """

    gated: bool
    activate: Callable[[Tensor], Tensor]

    @abstractmethod
    def outputs(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Returns the outputs of each token's experts, [tokens, experts of a token, hidden_size], times their shares.

        hidden: [tokens, hidden_size]. chosen: the experts of each token, [tokens, experts of a token] int64. shares:
        the same shape.
        """

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Returns the sum of each token's experts' outputs, [tokens, hidden_size]. Arguments: see `outputs`."""
        return self.outputs(hidden, chosen, shares).sum(1)


class GroupedExperts(Grouped):
    """Computes with the weights of the experts of `transformers`. `gate_up_proj` may have no gate."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self.gate_up_proj, self.down_proj = getattr(experts, first), experts.down_proj
        for name, own in zip(_BIASES, (f"{first}_bias", "down_proj_bias"), strict=True):  # [experts, outputs], or None
            self.register_parameter(name, getattr(experts, own, None))
        self.is_transposed = experts.is_transposed
        self.gated = experts.has_gate
        # not the module itself, which nothing but a module could replace
        self.activate = experts._apply_gate if experts.has_gate else experts.act_fn.__call__

    def outputs(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        from tgi_server.engine.kernels.triton.grouped_gemm import RowGroups, multiply_groups

        gate_up, down = self.gate_up_proj, self.down_proj
        if self.is_transposed:
            gate_up, down = gate_up.mT, down.mT
        of_token = chosen.shape[1]
        groups = RowGroups.of(chosen, len(down), hidden.element_size())
        biases = [getattr(self, name) for name in _BIASES]
        widened = multiply_groups(hidden, gate_up, biases[0], groups, of_token)
        outputs = multiply_groups(self.activate(widened), down, biases[1], groups, shares=shares.flatten())
        return outputs.view(len(hidden), of_token, -1)


def _waits(weight: Tensor) -> bool:
    """Returns True if torch has no kernel for the product."""
    if weight.dtype is not torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(weight.device) not in _GROUPED_MM


def _fault_of(experts: Any, kind: Callable[[Any], nn.Module], dtype: torch.dtype) -> str | None:
    """Computes some tokens with a layer's experts and with their replacement.

    Returns the reason not to use the replacement; None if it is right.
    """
    count, hidden, device = _facts(experts)
    if fault := device_fault(device):
        return fault
    generator = torch.Generator(device).manual_seed(0)

    def cases() -> Iterator[proofs.Case]:
        own = kind(experts)
        for share in (*_TOKENS, _MANY_TOKENS) if isinstance(experts, Experts) else _TOKENS:
            tokens = max(1, int(share * count))
            x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
            chosen = torch.randint(count, (tokens, 2), generator=generator, device=device)
            shares = torch.rand(tokens, 2, generator=generator, device=device).to(dtype)
            yield f"for {tokens} tokens", own(x, chosen, shares), experts(x, chosen, shares)

    return proofs.fault_of("the kernel of experts", cases)


def _facts(experts: Any) -> tuple[int, int, torch.device]:
    """Returns the number of a layer's experts, the elements of their inputs, and where they are."""
    if isinstance(experts, Experts):
        down: Any = experts.down[0]
        return len(experts.down), down.out_features, down.quantized.codes.device
    weight = experts.down_proj
    return len(weight), weight.shape[2 if experts.is_transposed else 1], weight.device


def _joins(experts: Experts) -> bool:
    """Returns True if one weight can hold the weights of all experts of a layer, with an order of inputs for each.

    Projections with the same input must have the same order.
    """
    for of_experts in (cast(Any, experts.gate_up), [[layer] for layer in cast(Any, experts.down)]):
        weights = [[layer.quantized for layer in layers] for layers in of_experts]
        if not all(own[0].joins(module) for own in weights for module in own):
            return False
        first, *others = (own[0].reordered(_order_of(own[0])) for own in weights)
        if not all(first.joins(other) for other in others):
            return False
    return True


def _order_of(weight: QuantizedWeight) -> Tensor:
    """Returns the inputs, sorted by their groups: [inputs] int64."""
    return weight.groups.argsort(stable=True)


class GroupedQuantizedExperts(Grouped):
    """Computes with weights that stay quantized. dtype: the model's dtype."""

    def __init__(self, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.gated, self.activate = bool(experts._stacked[0].has_gate), experts._gate
        self._experts = len(experts.down)
        self.gate_up = _AllExperts(cast(Any, experts.gate_up), dtype)
        self.down = _AllExperts([[layer] for layer in cast(Any, experts.down)], dtype)
        for name in _BIASES:
            self.register_parameter(name, getattr(experts, name))

    def outputs(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        from tgi_server.engine.kernels.triton.grouped_gemm import RowGroups
        from tgi_server.engine.kernels.triton.w4a16_gemm import DENSE_ROWS

        of_token = chosen.shape[1]
        dense = chosen.numel() >= DENSE_ROWS * self._experts
        rows = RowGroups.of(chosen, self._experts, hidden.element_size(), quantized=not dense)
        biases = [getattr(self, name) for name in _BIASES]
        widened = self.gate_up(hidden, biases[0], rows, of_token, dense=dense)
        outputs: Tensor = self.down(self.activate(widened), biases[1], rows, shares=shares.flatten(), dense=dense)
        return outputs.view(len(hidden), of_token, -1)


class _AllExperts(nn.Module):
    """The weights of a layer's experts as one weight, [experts * outputs, inputs], packed for the kernel."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    codebook: Tensor | None
    groups: Tensor
    order: Tensor | None

    def __init__(self, experts: Sequence[Sequence[QuantizedLinear]], dtype: torch.dtype) -> None:
        """experts: for each expert, the layers whose outputs are concatenated. The weights of all experts are joined.

        A few experts are packed at a time, because unpacked weights take a byte each.
        """
        from tgi_server.engine.linear.triton_quantized import TritonLinear

        super().__init__()
        parts: list[Any] = []
        orders = [_order_of(layers[0].quantized) for layers in experts]
        alike = all(torch.equal(orders[0], order) for order in orders)
        for start in range(0, len(experts), _PACKED_AT_ONCE):
            weights = []
            for layers, order in list(zip(experts, orders, strict=True))[start : start + _PACKED_AT_ONCE]:
                own = [layer.quantized for layer in layers]
                weights += own if alike else [weight.reordered(order) for weight in own]
            parts.append(TritonLinear(QuantizedWeight.joined(weights), None, None, dtype))
        self.kind, self.block = parts[0]._kind, parts[0].block
        zeros = None
        if any(part._zeros is not None for part in parts):
            zeros = _side_by_side(
                [torch.zeros_like(part._scales) if part._zeros is None else part._zeros for part in parts]
            )
        buffers = {
            "codes": torch.cat([part._codes for part in parts], 1),
            "scales": _side_by_side([part._scales for part in parts]),
            "zeros": zeros,
            "codebook": parts[0]._codebook,
            "groups": parts[0]._groups,
            "order": parts[0]._order if alike else _orders_of_places(torch.stack(orders), parts[0]),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(
        self, x: Tensor, bias: Tensor | None, rows: Any, of_token: int = 0, shares: Tensor | None = None, *, dense: bool
    ) -> Tensor:
        """Returns what `multiply_groups` does. dense: weights are dequantized first, since there are many rows."""
        from tgi_server.engine.kernels.triton.grouped_gemm import multiply_dequantized_groups, multiply_quantized_groups

        return (multiply_dequantized_groups if dense else multiply_quantized_groups)(
            x, self.codes, self.scales, self.zeros, self.codebook, self.groups, self.order, bias, rows, of_token,
            shares, kind=self.kind, block=self.block,
        )  # fmt: skip


def _orders_of_places(orders: Tensor, packed: Any) -> Tensor:
    """Returns the input at each place of a packed weight, `inputs` for none: [experts, places].

    orders: [experts, inputs], the inputs in the order in which they were packed.
    """
    places = packed.block * len(packed._groups)
    padded = pad(orders, (0, max(1, places - orders.shape[1])), value=orders.shape[1])
    return (padded[:, :places] if packed._order is None else padded[:, packed._order]).contiguous()


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Joins numbers of several weights along their outputs, in a dtype that holds all of them."""
    dtypes = {part.dtype for part in parts}
    return torch.cat([part.float() if len(dtypes) > 1 else part for part in parts], 1)
