"""Decoder layers, norms and heads fused for a device, which replace those of `transformers`."""

from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.optimise import fuse, limit_threads, optimise, pack_codes, unpack

__all__ = ["ScreenedHead", "fuse", "limit_threads", "optimise", "pack_codes", "unpack"]
