"""Quantised weights: how published checkpoints store them, and the one representation that all of them become."""

from tgi_server.engine.quantization.experts import Experts
from tgi_server.engine.quantization.layer import QuantizedLinear
from tgi_server.engine.quantization.recognition import Quantization, find_quantization
from tgi_server.engine.quantization.source import QuantizedSource
from tgi_server.engine.quantization.weight import QuantizedWeight

__all__ = ["Experts", "Quantization", "QuantizedLinear", "QuantizedSource", "QuantizedWeight", "find_quantization"]
