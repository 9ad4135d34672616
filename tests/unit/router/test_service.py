"""Places among the requests in flight are counted, and given back however the work ends."""

import pytest

from tgi_server.router.errors import Overloaded
from tgi_server.router.service import Capacity, ModelDescription


def test_beyond_the_limit_nothing_is_taken():
    capacity = Capacity(3)
    capacity.take(2)
    with pytest.raises(Overloaded, match="3 requests are in flight; try again later"):
        capacity.take(2)
    assert capacity.in_flight == 2
    capacity.take(1)
    capacity.give_back(3)
    assert capacity.in_flight == 0


def test_places_are_given_back_after_an_error():
    capacity = Capacity(1)
    with pytest.raises(KeyError), capacity.places(1):
        raise KeyError
    with capacity.places(1):
        assert capacity.in_flight == 1
    assert capacity.in_flight == 0


def test_the_fingerprint_names_the_version():
    assert (
        ModelDescription("m", ["m"], None, "cpu", encoder_decoder=False, version="1.2.3").fingerprint == "1.2.3-native"
    )
