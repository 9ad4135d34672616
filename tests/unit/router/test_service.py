"""Places among the requests in flight are counted, and given back however the work ends."""

import pytest

from tgi_server.router.errors import Overloaded
from tgi_server.router.service import Capacity, ModelDescription


def test_beyond_the_limit_nothing_is_taken():
    capacity = Capacity(3)
    capacity.take(2)
    with pytest.raises(Overloaded, match="2 requests are in flight; try again later"):
        capacity.take(2)
    assert capacity.in_flight == 2
    capacity.take(1)
    capacity.give_back(3)
    assert capacity.in_flight == 0


def test_one_owner_may_have_all_places_and_others_still_get_their_share():
    capacity = Capacity(8)
    capacity.take(8, "a")
    with pytest.raises(Overloaded):
        capacity.take(1, "a")
    capacity.take(4, "b")
    with pytest.raises(Overloaded):
        capacity.take(1, "b")
    capacity.take(2, "c")
    with pytest.raises(Overloaded):
        capacity.take(1, "c")
    capacity.give_back(8, "a")
    capacity.take(2, "b")
    capacity.take(2, "a")
    with pytest.raises(Overloaded):
        capacity.take(1, "a")


def test_however_many_owners_there_are_the_places_have_an_end():
    capacity = Capacity(8)
    capacity.take(8, "a")
    for owner in range(8):
        capacity.take(1, str(owner))
    with pytest.raises(Overloaded, match="16 requests are in flight"):
        capacity.take(1, "b")


def test_the_fingerprint_names_the_version():
    assert (
        ModelDescription("m", ["m"], None, "cpu", encoder_decoder=False, version="1.2.3").fingerprint == "1.2.3-native"
    )
