"""The engine's own CPU kernels: compiled once for the machine they run on, or beforehand, and loaded from a cache."""

from tgi_server.engine.kernels.build import compile_beside, compiled_library, load_kernels
from tgi_server.engine.kernels.structures import structure

__all__ = ["compile_beside", "compiled_library", "load_kernels", "structure"]
