"""The engine's own CPU kernels: compiled once for the machine they run on, then loaded from a cache."""

from tgi_server.engine.kernels.build import load_kernels

__all__ = ["load_kernels"]
