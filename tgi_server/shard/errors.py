"""What can go wrong before a model is served. `str()` of an error is one line that says what to do."""


class ShardError(Exception):
    """Base of the shard's own errors."""


class ModelUnavailable(ShardError):
    """The model's files are not there and cannot be fetched, or are of a kind that is not loaded."""
