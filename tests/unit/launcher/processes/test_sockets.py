import socket
from pathlib import Path

import pytest

from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.processes.sockets import is_listening, shard_sockets


@pytest.fixture
def listener(tmp_path: Path) -> Path:
    """A socket with a listener."""
    path = tmp_path / "shard-0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


def test_without_a_path_every_server_has_a_folder_of_its_own() -> None:
    with shard_sockets(None, range(2)) as first, shard_sockets(None, range(2)) as second:
        assert len({*first, *second}) == 4
        assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in first)
    assert not first[0].parent.exists()


def test_sockets_are_named_by_rank_and_removed(tmp_path: Path) -> None:
    with shard_sockets(tmp_path / "shard", range(3)) as paths:
        assert [path.name for path in paths] == ["shard-0", "shard-1", "shard-2"]
        paths[1].touch()
    assert not list(tmp_path.iterdir())


def test_a_socket_in_use_is_refused_and_left_alone(listener: Path) -> None:
    with (
        pytest.raises(CannotStartError, match="another server listens"),
        shard_sockets(listener.parent / "shard", range(1)),
    ):
        pass
    assert is_listening(listener)


def test_what_a_dead_server_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with shard_sockets(tmp_path / "shard", range(1)) as (cleared,):
        assert not cleared.exists()


def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shard-0").touch()
    with pytest.raises(CannotStartError, match="is not a socket"), shard_sockets(tmp_path / "shard", range(1)):
        pass
    assert (tmp_path / "shard-0").exists()


@pytest.mark.parametrize(("path", "reason"), [("absent/shard", "no folder"), ("a" * 120, "longer than")])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(CannotStartError, match=reason), shard_sockets(tmp_path / path, range(1)):
        pass
