"""What can go wrong with a download, in one line for the person who runs it."""


class DownloadError(Exception):
    """A download cannot be done; the message says why and what to do."""


class ChecksumError(DownloadError):
    """What was received is not what was asked for."""
