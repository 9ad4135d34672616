"""What makes `transformers` models fast on a CPU: weights packed once, and decoder layers in a handful of kernels."""

from tgi_server.engine.cpu.optimise import optimise

__all__ = ["optimise"]
