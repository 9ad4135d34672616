"""Decoder layers, norms and heads fused for a device, which replace those of `transformers`."""

from tgi_server.engine.backends.build import fuse, limit_threads, optimise, pack_codes, unpack
from tgi_server.engine.backends.head import ScreenedHead

__all__ = ["ScreenedHead", "fuse", "limit_threads", "optimise", "pack_codes", "unpack"]
