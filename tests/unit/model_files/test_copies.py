"""Advice about the folder of copies and downloads."""

import errno

import pytest

from tgi_server.model_files.copies import storage_hint


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "; free space on the disk of /cache, or let HF_HUB_CACHE name a folder on another one"),
        (errno.EACCES, "; run `sudo chown -R "),
        (errno.ENOENT, ""),
    ],
)
def test_errors_of_the_disk_come_with_advice(number: int, hint: str) -> None:
    told = storage_hint(OSError(number, "told by the system"), "/cache")
    assert told.startswith(hint)
    assert bool(told) == bool(hint)
