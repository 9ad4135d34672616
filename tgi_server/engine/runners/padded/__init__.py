"""Padded batches, which run any model: with its own attention and cache, and padding between sequences."""

from tgi_server.engine.runners.padded.runner import PaddedRunner

__all__ = ["PaddedRunner"]
