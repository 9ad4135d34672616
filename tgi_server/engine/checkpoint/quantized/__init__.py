"""Quantised weights: how published checkpoints store them, and the one representation that all of them become."""

from tgi_server.engine.checkpoint.quantized.experts import Experts
from tgi_server.engine.checkpoint.quantized.layer import QuantizedEmbedding, QuantizedLinear
from tgi_server.engine.checkpoint.quantized.recognition import Quantization, find_quantization
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight

__all__ = ["Experts", "Quantization", "QuantizedEmbedding", "QuantizedLinear", "QuantizedWeight", "find_quantization"]
