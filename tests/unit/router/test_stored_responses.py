"""Responses are stored for the key that requested them, and those of one key do not displace another key's."""

import pytest

from tgi_server.router import stored_responses
from tgi_server.router.errors import NoSuchResponse
from tgi_server.router.stored_responses import StoredResponse, StoredResponses


def filled(most: int, *entries: tuple[str, str, int]) -> StoredResponses:
    """Returns responses by tenant and id, each of so many bytes."""
    stored = StoredResponses(most)
    for tenant, response_id, size in entries:
        stored.add(tenant, response_id, StoredResponse(b"r" * (size - 1), b"m"))
    return stored


def has(stored: StoredResponses, tenant: str, response_id: str) -> bool:
    try:
        return stored.get(tenant, response_id).turns == b"m"
    except NoSuchResponse:
        return False


def test_the_tenant_with_most_responses_gives_up_its_oldest():
    stored = filled(4, ("a", "1", 9), ("b", "1", 9), ("b", "2", 9), ("b", "3", 9), ("b", "4", 9), ("a", "2", 9))
    assert [has(stored, "a", each) for each in "12"] == [True, True]
    assert [has(stored, "b", each) for each in "1234"] == [False, False, True, True]


def test_the_tenant_with_most_bytes_gives_up_its_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored_responses, "_MOST_BYTES", 100)
    stored = filled(9, ("a", "1", 40), ("b", "1", 30), ("b", "2", 30), ("b", "3", 30))
    assert has(stored, "a", "1")
    assert [has(stored, "b", each) for each in "123"] == [False, True, True]
    stored.add("b", "4", StoredResponse(b"r" * 101, b"m"))
    assert has(stored, "a", "1")
    assert not any(has(stored, "b", each) for each in "1234")


def test_what_is_deleted_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored_responses, "_MOST_BYTES", 100)
    stored = filled(9, ("a", "1", 60), ("a", "2", 40))
    stored.delete("a", "1")
    stored.add("a", "3", StoredResponse(b"r" * 59, b"m"))
    assert [has(stored, "a", each) for each in "123"] == [False, True, True]
    with pytest.raises(NoSuchResponse):
        stored.delete("b", "2")


def test_none_are_stored_where_none_may_be():
    assert not has(filled(0, ("a", "1", 9)), "a", "1")
