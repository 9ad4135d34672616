"""Errors that end the launcher. `str()` of an error is the one line that the user reads."""


class LauncherError(Exception):
    """Base of the launcher's errors. status: the exit code."""

    status = 1


class CannotStartError(LauncherError):
    """A mistake that was found before anything was started."""


class ModelMissingError(LauncherError):
    """The model is not here and could not be fetched; the process that tried has said why."""

    def __init__(self, status: int) -> None:
        super().__init__("")
        self.status = status


class ProcessEndedError(LauncherError):
    """A shard or the router ended by itself."""
