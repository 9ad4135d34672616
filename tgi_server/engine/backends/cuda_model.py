"""Models of specs on GPUs: a few kernels in Triton and products of cuBLAS for each layer, captured as CUDA graphs."""

from torch import Tensor

from tgi_server.engine.backends.decoder import Norm
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.kernels.triton import norm_and_gate


class CudaModel(ReferenceModel):
    """Runs a decoder layer by layer. The host never reads a result in between, so any step can be captured."""

    name = "fused layers"

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        if not norm.centred:
            return norm_and_gate.rms_norm(x, norm.weight, norm.eps)
        if norm.bias is not None and norm.weight.dim() == 1:
            return norm_and_gate.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return norm(x)

    def _activated(self, up: Tensor) -> Tensor:
        return norm_and_gate.activate(up, self._spec.activation, gated=self._spec.gated_mlp)
