from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from tgi_server.router.adapter_source import AdapterSource, AdapterSources


@pytest.mark.parametrize(
    ("text", "adapter_id", "place", "revision"),
    [
        ("maker/chef", "maker/chef", "maker/chef", None),
        ("maker/chef@v2", "maker/chef", "maker/chef", "v2"),
        ("chef=maker/chef", "chef", "maker/chef", None),
        (" chef = maker/chef@v2 ", "chef", "maker/chef", "v2"),
        ("chef=maker/chef:v2", "chef", "maker/chef", "v2"),
        ("chef=/data/chef", "chef", "/data/chef", None),
        ("/data/chef", "/data/chef", "/data/chef", None),
        ("chef=adapters/chef.gguf", "chef", "adapters/chef.gguf", None),
    ],
)
def test_every_form_of_tgi_is_read(text: str, adapter_id: str, place: str, revision: str | None) -> None:
    source = AdapterSource.of(text)
    assert source == AdapterSource(adapter_id, place, revision)
    assert AdapterSource.of(str(source)) == source
    assert (source.path is None) == (place == "maker/chef")


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "chef@home:2"
    folder.mkdir()
    assert AdapterSource.of(f"chef={folder}") == AdapterSource("chef", str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("=maker/chef", "an adapter's id has 1 to 256 printable characters"),
        ("chef=", "is not ID, ID=FOLDER, ID=FILE.gguf or ID=OWNER/NAME"),
        ("maker/chef@", "is not ID, ID=FOLDER, ID=FILE.gguf or ID=OWNER/NAME"),
        ("chef=/data/chef@v2", "a folder has no revision"),
        ("ch\tef=/data/chef", "printable"),
        ("_other=/data/chef", "'_other' cannot be an adapter's id"),
        ("a=/data/a, b=/data/b, a=/data/c", "the id 'a' is given twice"),
    ],
)
def test_what_cannot_be_meant_is_told(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AdapterSources).validate_python(text)


def test_several_are_separated_by_commas() -> None:
    read = TypeAdapter(AdapterSources).validate_python("maker/a, b=maker/b,")
    assert [source.id for source in read] == ["maker/a", "b"]
