"""The engine's errors. `str()` of an error is one line that says what to do."""


class EngineError(Exception):
    """Base of the engine's errors."""


class ModelNotFound(EngineError):
    """The model folder is missing, or lacks a file without which nothing can be loaded."""


class InvalidWeights(EngineError):
    """A weight file is corrupt, incomplete, or of a kind that is not loaded."""


class UnsupportedModel(EngineError):
    """The model cannot be run, or not with these settings."""


class InvalidAdapter(EngineError):
    """An adapter cannot be read, asks for something that is not supported, or does not fit the base model."""


class NotEnoughMemory(EngineError):
    """The requested KV cache or sequences do not fit beside the model's weights."""


class InvalidCall(EngineError):
    """A call that contradicts the engine's state: an unknown request, a chunk past the prompt's end."""


class InvalidImage(EngineError):
    """An image of a request is not one that the model reads, or does not fit the prompt."""


class CannotConnect(EngineError):
    """The shards of a model could not connect to each other."""


class PeerLost(RuntimeError):
    """Another shard has ended in the middle of a step, or does not come to the same point of it."""
