"""What is held for clients has a limit: new requests are refused, and the largest of the largest address goes."""

from dataclasses import dataclass

import pytest

from tgi_server.router.api.memory import Account, Lease
from tgi_server.router.errors import Overloaded, PayloadTooLarge

MIB = 2**20


@dataclass(eq=False)
class Holder:
    network: str
    held: int
    broken_off: bool = False

    def refuse(self) -> None:
        self.broken_off = True


def account(*holders: Holder, most: int = 100, share: float = 0.5) -> Account:
    made = Account(most, share)
    for each in holders:
        made.add(each)
    return made


def test_the_largest_of_the_address_that_has_most_goes_until_the_rest_is_bearable(caplog: pytest.LogCaptureFixture):
    large, small, middle, other = Holder("a", 60), Holder("b", 30), Holder("b", 40), Holder("b", 20)
    account(large, small, middle, other, most=110).shed()
    assert [each.broken_off for each in (large, small, middle, other)] == [False, False, True, False]
    assert "--max-client-memory" in caplog.text


def test_a_closed_connection_counts_no_more_though_its_request_ends_later():
    made = account(Holder("a", 150))
    made.shed()
    made.admit("a", 50)


def test_who_holds_little_stays_whoever_else_comes():
    modest, flood = Holder("a", 45), [Holder("b", 5) for _ in range(30)]
    account(modest, *flood).shed()
    assert not modest.broken_off
    assert 18 <= sum(each.broken_off for each in flood) <= 20


def test_nobody_goes_while_there_is_room():
    holders = [Holder("a", 50), Holder("b", 50)]
    account(*holders).shed()
    assert not any(each.broken_off for each in holders)


def test_a_request_has_to_fit_beside_all_others_and_into_the_share_of_its_address():
    made = account(Holder("a", 45), Holder("b", 40))
    made.shed()
    made.admit("a", 5)
    with pytest.raises(Overloaded, match="--max-client-memory"):
        made.admit("a", 6)
    made.admit("b", 10)
    with pytest.raises(Overloaded):
        made.admit("c", 16)
    with pytest.raises(PayloadTooLarge, match="51 bytes"):
        made.admit("c", 51)


def test_what_comes_fast_is_looked_at_before_the_next_second():
    holder = Holder("a", 200 * MIB)
    made = account(holder, most=100 * MIB)
    made.grew(10 * MIB)
    assert not holder.broken_off
    made.grew(10 * MIB)
    assert holder.broken_off


def test_a_lease_counts_its_request_and_the_answer_so_far():
    made = Account(MIB, 1.0)
    lease = Lease(made, "a", lambda: None)
    made.add(lease)
    lease.grow(1_000)
    lease.answer = lambda: 500
    assert lease.held == 1_500
    lease.parse(b'{"a": [1, 2]}')
    assert lease.held > 1_900
    made.remove(lease)
    made.admit("a", MIB)
