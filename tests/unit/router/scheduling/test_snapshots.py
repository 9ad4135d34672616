"""Snapshots of states: which there are, which give way, and from which a prompt is continued."""

from tests.fakes.simulation import Simulation
from tgi_server.router.scheduling.snapshots import Snapshots

SPACE = ("", "")


def text(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def saved(snapshots: Snapshots, tokens: list[int]) -> None:
    snapshots.save(1, SPACE, text(tokens))
    snapshots.due.clear()


def cached_tokens(simulation: Simulation) -> int:
    """Returns how many tokens the last request began with."""
    return [request.cached_tokens for call in simulation.prefills() for request in call.requests][-1]


def test_the_longest_beginning_is_found() -> None:
    snapshots = Snapshots(4, block_size=2)
    saved(snapshots, [1, 2])
    saved(snapshots, [1, 2, 3, 4])
    assert snapshots.find(SPACE, text([1, 2, 3, 4, 5, 6])) == (4, 2)
    assert snapshots.find(SPACE, text([1, 2, 3])) == (2, 1)
    assert snapshots.find(SPACE, text([2, 1, 3, 4])) == (0, 0)
    assert snapshots.find(("adapter", ""), text([1, 2])) == (0, 0)


def test_what_a_call_saves_is_for_later_calls() -> None:
    snapshots = Snapshots(4, block_size=2)
    snapshots.save(1, SPACE, text([1, 2]))
    assert snapshots.find(SPACE, text([1, 2])) == (0, 0)
    snapshots.due.clear()
    assert snapshots.find(SPACE, text([1, 2])) == (2, 1)


def test_the_least_recently_used_gives_way() -> None:
    snapshots = Snapshots(2, block_size=1)
    saved(snapshots, [1])
    saved(snapshots, [2])
    assert snapshots.find(SPACE, text([1])) == (1, 1)
    saved(snapshots, [3])
    assert snapshots.find(SPACE, text([2])) == (0, 0)
    assert snapshots.find(SPACE, text([3])) == (1, 2)
    snapshots.drop(SPACE, text([3]))
    snapshots.check()


def test_a_prompt_is_saved_at_its_end_where_others_part_and_at_growing_distances() -> None:
    assert Snapshots(100, block_size=10).lengths(1000, 333) == [330, 350, 830, 950, 990]
    assert Snapshots(8, block_size=10).lengths(1000, 333) == [990]
    assert Snapshots(8, block_size=10).lengths(10, 0) == []


def test_the_next_turn_of_a_conversation_finds_nearly_all_of_the_last_one() -> None:
    simulation = Simulation(num_blocks=200, num_snapshots=8)
    prompt = [*range(1, 100)]
    sink = simulation.submit(prompt, 40, ignore_eos=True)
    simulation.run()
    turn = [*prompt, *sink.tokens]
    simulation.submit([*turn, 5, 6, 7], 4)
    simulation.run()
    cached = cached_tokens(simulation)
    assert len(turn) - 2 * simulation.shard.block_size <= cached < len(turn)
    simulation.check_tokens()


def test_a_common_beginning_is_saved_where_two_prompts_part() -> None:
    simulation = Simulation(num_blocks=200, num_snapshots=32)
    common, cached = [*range(1, 42)], []
    for request in range(3):
        simulation.submit([*common, *[100 + request] * 30], 2)
        simulation.run()
        cached.append(cached_tokens(simulation))
    assert cached == [0, 4, 40]
    simulation.check_tokens()


def test_lent_snapshots_are_not_given_to_others() -> None:
    snapshots = Snapshots(2, 2)
    for number, text in enumerate((b"1111" * 2, b"2222" * 2)):
        snapshots.save(number, "", text)
    snapshots.due.clear()
    ((length, number),) = snapshots.after("", b"1111" * 3)
    assert length == 2
    snapshots.lend(number)
    snapshots.save(3, "", b"3333" * 2)
    assert snapshots.find("", b"1111" * 3) == (2, number)
    assert snapshots.find("", b"2222" * 3) == (0, 0)
    snapshots.drop("", b"1111" * 2)
    snapshots.check()
    free = snapshots.lend_free()
    assert free not in (0, number)
    snapshots.save(4, "", b"4444" * 2)  # there is no place for it
    assert (snapshots.lend_free(), [*snapshots.due]) == (0, [])
    snapshots.put("", b"5555" * 2, free)
    snapshots.check()
    for each in (number, free):
        snapshots.give_back(each)
    snapshots.check()
    assert snapshots.find("", b"5555" * 2) == (2, free)
