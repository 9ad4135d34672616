"""Mistakes in a `downloads.toml`."""

from pathlib import Path

import pytest

from llm_functionalities.download.__main__ import CONFIG
from llm_functionalities.download.config import DownloadError, read_downloads

BASE = 'name = "test"\nbase_path = "models"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "not TOML"),
        ('name = "test"', "base_path"),
        (BASE + "typo = 1", "typo"),
        (BASE + '[[sources]]\nid = "a"\nurls = []', "urls"),
        (BASE + '[[sources]]\nid = ""\nurls = [["http://x/a", "a"]]', "id"),
        (BASE + '[[sources]]\nid = "a"\nurls = ["http://x/a"]', "local file name"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["s3://x/a", "a"]]', "s3://x/a"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "../a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "/etc/a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nlocal_path = "/etc"\nurls = [["http://x/a", "a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "a", "123"]]', "sha256"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "a"], ["http://x/b", "a"]]', "'a'"),
        (BASE + 2 * '[[sources]]\nid = "a"\nurls = [["http://x/a", "a"]]\n', "id 'a'"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "downloads.toml"
    path.write_text(text)
    with pytest.raises(DownloadError, match=complaint) as failure:
        read_downloads(path)
    assert str(path) in str(failure.value)


def test_the_shipped_configuration_can_be_read() -> None:
    downloads = read_downloads(CONFIG)
    assert not [source for source in downloads.sources if source.enabled]
    assert downloads.artefact("smollm2").name == "smollm2"
