"""Errors of a model's files. `str()` of one is a line that says what to do."""


class ModelUnavailable(Exception):
    """The model's files are not there and cannot be fetched, or are of a kind that is not loaded."""
