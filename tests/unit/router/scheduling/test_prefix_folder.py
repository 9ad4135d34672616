import os
from pathlib import Path

import pytest

from tgi_server.prefix_files import Header
from tgi_server.router.scheduling.prefix_folder import PrefixFolder, StoredFile

LAYOUT = b"layout of 16 byt"
SIZE = 4
TOKENS = bytes(range(4 * SIZE * 4))


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def opened(
    place: Path, size: int = 10_000, layout: bytes = LAYOUT, clock: Clock | None = None, shards: int = 1
) -> PrefixFolder:
    folder = PrefixFolder(place, size, layout, max_age_s=100, shards=shards, clock=clock or Clock())
    folder.open()
    return folder


def written(folder: PrefixFolder, namespace: str = "", entries: slice = slice(0, 4), *, ranks: int = 1) -> StoredFile:
    """Writes a file as shards do, and adds it."""
    root = folder.root("", namespace)
    digests = list(folder.chain(root, TOKENS, SIZE))[entries]
    file = folder.new_file(folder.namespace(namespace), digests)
    header = Header(LAYOUT, root, tuple(digests), 10, (0,) * len(digests))
    for rank in range(ranks):
        path = folder.folder / f"{file.stem}.{rank}"
        path.write_bytes(header.packed() + bytes(10 * len(digests)))
        os.utime(path, (1_000_000, 1_000_000))
        file.size += path.stat().st_size
    file.ranks = set(range(ranks))
    folder.add(file)
    return file


def found(folder: PrefixFolder, namespace: str = "") -> list[tuple[str, int] | None]:
    chain = folder.chain(folder.root("", namespace), TOKENS, SIZE)
    places = map(folder.find, chain)
    return [None if place is None else (place[0].stem, place[1]) for place in places]


def test_what_was_written_is_found_again_by_the_next_start(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    first, second = written(folder, entries=slice(0, 3), ranks=2), written(folder, entries=slice(3, 4))
    expected = [(first.stem, 0), (first.stem, 1), (first.stem, 2), (second.stem, 0)]
    assert found(folder) == expected
    again = opened(tmp_path)
    assert found(again) == expected
    assert again.bytes == folder.bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.blocks.*"))
    assert found(again, "another namespace") == [None] * 4
    assert found(opened(tmp_path, layout=b"another layout..")) == [None] * 4
    assert again.secret("a") == folder.secret("a") != folder.secret("b")
    assert found(opened(tmp_path / "elsewhere")) == [None] * 4


def test_texts_that_part_have_no_later_digest_in_common(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    root = folder.root("", "")
    one, other = (list(folder.chain(root, text, SIZE)) for text in (TOKENS, TOKENS[:20] + b"x" + TOKENS[21:]))
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
    assert folder.root("adapter", "") != root != folder.root("", "adapter")


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    folder = opened(tmp_path, size=1000)
    files = [written(folder, namespace) for namespace in "abc"]
    assert folder.use([files[0]]) == [files[0]]
    dropped = folder.make_room(1000 - files[0].size)
    assert dropped == [files[1], files[2]]
    folder.delete(dropped)
    assert folder.use(files) == [files[0]]
    assert len(list(tmp_path.rglob("*.blocks.0"))) == 1
    assert opened(tmp_path, size=10).bytes == 0
    assert not list(tmp_path.rglob("*.blocks.0"))


def test_unused_files_are_deleted(tmp_path: Path) -> None:
    clock = Clock()
    folder = opened(tmp_path, clock=clock)
    first, second = written(folder, "a"), written(folder, "b")
    clock.now += 99
    folder.note_use(folder.use([first]))
    clock.now += 2
    assert folder.expired() == [second]
    folder.delete([second])
    again = opened(tmp_path, clock=clock)
    assert found(again, "a")[0] is not None
    clock.now += 99
    assert opened(tmp_path, clock=clock).bytes == 0


def test_a_namespace_is_forgotten_in_files_of_other_models_too(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    written(folder, "a")
    kept = written(folder, "b")
    other = opened(tmp_path, layout=b"another layout..")
    other.delete(other.forget("a"))
    assert [file.name for file in tmp_path.rglob("*.blocks.0")] == [f"{kept.stem}.0"]


def test_damaged_files_are_deleted_and_others_left_alone(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    file = written(folder)
    path = folder.folder / f"{file.stem}.0"
    path.write_bytes(path.read_bytes()[:-1])
    for name in ("notes.txt", f"{file.stem}.0.bak", "0.unfinished"):
        (folder.folder / name).write_bytes(b"x")
    again = PrefixFolder(tmp_path, 10_000, LAYOUT, 100, clock=Clock())
    assert again.open() == 1
    assert again.bytes == 0
    assert {each.name for each in folder.folder.iterdir()} == {
        "key",
        "lock",
        "notes.txt",
        f"{file.stem}.0.bak",
        "0.unfinished",
    }


def test_a_file_that_takes_the_place_of_another_is_found_alone(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    whole = written(folder)
    end = written(folder, entries=slice(2, 4))
    assert whole.stem == end.stem
    assert found(folder) == [None, None, (end.stem, 0), (end.stem, 1)]
    assert folder.bytes == end.size


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "oatmill-prefixes"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(OSError, match="only this user"):
        opened(tmp_path)


def test_a_damaged_key_is_told(tmp_path: Path) -> None:
    key = opened(tmp_path).folder / "key"
    key.write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        opened(tmp_path)


def test_one_server_of_a_folder_writes_and_all_see_what_it_wrote(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.lock()
    assert not other.lock()
    file = written(one)
    one.unlock()
    assert (one.changed, other.changed) == (False, True)
    assert found(other) == [None] * 4
    assert other.take(other.listing()) == []
    assert found(other) == found(one)
    assert other.bytes == one.bytes
    assert other.lock()
    other.delete(other.forget(""))
    other.unlock()
    assert not one.exists(file)
    one.take(one.listing())
    assert (found(one), one.bytes) == ([None] * 4, 0)
    assert one.lock()
    one.close()  # as if its process had ended
    assert other.lock()


def test_what_another_server_used_is_deleted_later(tmp_path: Path) -> None:
    clock = Clock()
    one, other = opened(tmp_path, size=1000, clock=clock), opened(tmp_path, size=1000, clock=clock)
    first, second = written(one, "a"), written(one, "b")
    other.take(other.listing())
    clock.now += 10
    one.note_use(one.use([first]))
    other.take(other.listing())
    assert [file.stem for file in other.make_room(1000 - first.size)] == [second.stem]


def test_files_that_lack_those_of_a_shard_are_not_used_and_are_deleted_by_who_may_write(tmp_path: Path) -> None:
    writing = opened(tmp_path, shards=2)
    assert writing.lock()
    written(writing, ranks=1)
    reading = opened(tmp_path, shards=2)
    assert (found(reading), len(list(tmp_path.rglob("*.blocks.0")))) == ([None] * 4, 1)
    written(writing, ranks=2)
    writing.unlock()
    reading.take(reading.listing())
    assert found(reading) == found(writing)
    (tmp_path / "oatmill-prefixes" / f"{written(writing, ranks=2).stem}.1").unlink()
    opened(tmp_path, shards=2)
    assert list(tmp_path.rglob("*.blocks.*")) == []
