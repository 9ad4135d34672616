"""The way to run a model that takes any model: its own attention and cache, and padding between sequences."""

from tgi_server.engine.runners.padded.runner import PaddedRunner

__all__ = ["PaddedRunner"]
