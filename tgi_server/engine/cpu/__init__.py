"""What makes `transformers` models fast on a CPU: weights packed once, and decoder layers in a handful of kernels."""

from tgi_server.engine.cpu.head import ScreenedHead
from tgi_server.engine.cpu.optimise import linear_layer, optimise, unpack
from tgi_server.engine.cpu.threads import limit_threads

__all__ = ["ScreenedHead", "limit_threads", "linear_layer", "optimise", "unpack"]
