from shared.prefix_affinity import STEP_BYTES, PrefixAffinity

STEP = b"x" * STEP_BYTES


def test_the_longest_beginning_of_each_server_is_known() -> None:
    affinity = PrefixAffinity()
    affinity.sent(STEP * 3, "a")
    affinity.sent(STEP + b"y" * STEP_BYTES, "b")
    assert affinity.known(STEP * 4) == {"a": 3 * STEP_BYTES, "b": STEP_BYTES}
    assert affinity.known(STEP * 2 + b"z") == {"a": 2 * STEP_BYTES, "b": STEP_BYTES}
    assert affinity.known(b"z" + STEP * 4) == {}
    assert affinity.known(STEP[:-1]) == {}


def test_the_beginnings_that_were_not_used_for_long_are_forgotten() -> None:
    affinity = PrefixAffinity(most=3)
    affinity.sent(STEP, "a")
    affinity.sent(b"y" * 3 * STEP_BYTES, "b")
    assert affinity.known(STEP) == {}
    assert affinity.known(b"y" * 3 * STEP_BYTES) == {"b": 3 * STEP_BYTES}


def test_only_the_latest_servers_of_a_beginning_are_known() -> None:
    affinity = PrefixAffinity()
    for number in range(20):
        affinity.sent(STEP, str(number))
    assert sorted(map(int, affinity.known(STEP))) == list(range(12, 20))
