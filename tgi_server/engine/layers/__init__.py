"""Decoder layers, norms and heads fused for a device (today: CPUs), which replace those of `transformers`."""

from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.optimise import limit_threads, optimise, unpack

__all__ = ["ScreenedHead", "limit_threads", "optimise", "unpack"]
