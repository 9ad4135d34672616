"""The engine's own CPU kernels: compiled once for the machine they run on, or beforehand, and loaded from a cache."""

from tgi_server.engine.kernels.build import cache_path, compile_beside, compiled_library, load_kernels, user_cache

__all__ = ["cache_path", "compile_beside", "compiled_library", "load_kernels", "user_cache"]
