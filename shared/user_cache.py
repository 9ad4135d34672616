"""The folder of what is kept between starts."""

import os
from pathlib import Path

NO_HOME = Path(os.devnull)  # below which nothing can be written


def user_cache() -> Path:
    """Returns the folder of what is kept between starts, in XDG_CACHE_HOME or ~/.cache. It may not be writable."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oatmill"
    except RuntimeError:  # neither HOME nor /etc/passwd has a home of this user
        return NO_HOME / "oatmill"
