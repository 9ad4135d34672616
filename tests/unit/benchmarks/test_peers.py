"""The sides of a comparison."""

import json
from pathlib import Path

import pytest

from benchmarks.floor import Machine, ModelCost
from benchmarks.load import MeasuredRequest, WorkloadResult
from benchmarks.peers import Comparison, Round, Side, _arguments
from benchmarks.report import Summary, finish, summarise
from benchmarks.servers import ServerCommand, ServerDidNotStart, chosen_peers
from benchmarks.workloads import Workload

WORKLOAD = Workload("X", users=2, words=3, new_tokens=4, repeat=1, stream=False)


def comparison(model: Path, ours: Side, *peers: Side) -> Comparison:
    return Comparison(model, Machine(bandwidth=100, matrix_rate=1e9), ModelCost(50, 8, 2), [WORKLOAD], ours, peers)


def taking(seconds: float, failures: int = 0) -> Summary:
    records = [MeasuredRequest(latency=seconds, first_token=None, gaps=[], new_tokens=4, prompt_tokens=5)] * 2
    return summarise(WorkloadResult(WORKLOAD, records, ["refused"] * failures, seconds=seconds))


def comparison_of(*summaries: list[Summary]) -> Comparison:
    """Makes a comparison of servers a, b, ... by the summaries of each round."""
    sides = [
        Side(ServerCommand(name, "serve"), [Round(1.0, [one]) for one in every])
        for name, every in zip("abc", summaries, strict=False)
    ]
    return comparison(Path("model"), *sides)


def test_ratios_are_taken_within_rounds_and_above_one_where_ours_is_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    compared = comparison_of([taking(1), taking(4), taking(8)], [taking(2), taking(4), taking(24)])
    (peer,) = compared.peers
    assert compared.ratios(peer, 0, "tokens_per_s") == pytest.approx([2, 1, 3])
    assert compared.ratios(peer, 0, "latency_p50") == pytest.approx([2, 1, 3])
    compared.print()
    printed = capsys.readouterr().out
    assert "median of 3 rounds" in printed
    assert "| 1.00-3.00 |" in printed
    assert "4.00 / 4.00 (2.00)" in printed
    assert [compared.times_floor(side, 0) for side in compared.sides] == pytest.approx([2, 2])
    finish([compared], None)
    (result,) = json.loads(capsys.readouterr().out)
    assert [one["summaries"][0]["latency_p50"] for one in result["ours"]["rounds"]] == [1, 4, 8]


def test_each_peer_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    compared = comparison_of([taking(2)], [taking(4)], [taking(1)])
    assert [compared.ratios(peer, 0, "tokens_per_s") for peer in compared.peers] == [[2], [0.5]]
    compared.print()
    printed = capsys.readouterr().out
    assert "a / b (ratio)" in printed
    assert "a / c (ratio)" in printed


def test_failed_requests_of_all_sides_are_counted() -> None:
    assert comparison_of([taking(1, failures=2)], [taking(1, failures=1)], [taking(1)]).failures == 3


def test_servers_to_compare_with_have_programs_and_names_of_their_own(monkeypatch, capsys) -> None:
    def parsed(*flags: str) -> list[tuple[str, str]]:
        monkeypatch.setattr("sys.argv", ["peers", "--model", "m", *flags])
        return [(peer.name, str(peer.programs)) for peer in chosen_peers(_arguments())]

    beside = parsed("--peer", "vllm", "openvino", "--peer-programs", "/a", "/b", "--peer-command", "int8=serve {model}")
    assert beside[:2] == [("vllm", "/a"), ("openvino", "/b")]
    assert beside[2][0] == "int8"
    for flags, complaint in (
        ((), "name a server to compare with"),
        (("--peer-command", "serve", "serve"), "need names of their own"),
        (("--peer", "vllm", "--peer-programs", "/a", "/b"), "more folders than servers"),
    ):
        with pytest.raises(SystemExit):
            parsed(*flags)
        assert complaint in capsys.readouterr().err


def test_each_server_goes_first_in_turn() -> None:
    compared = comparison_of([taking(1)], [taking(1)], [taking(1)])
    assert ["".join(side.command.name for side in compared.order(round_)) for round_ in range(4)] == [
        *("abc", "bca", "cab", "abc")
    ]


async def test_a_round_that_one_server_does_not_survive_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "health").touch()
    files = ServerCommand("files", "python -m http.server --directory {model} {port}")
    compared = comparison(tmp_path, Side(files), Side(files))
    await compared.run(rounds=1, start_limit=60)
    assert compared.failures == 4, "a server of files generates nothing"
    compared.peers[0].command = ServerCommand("peer", "false")
    with pytest.raises(ServerDidNotStart, match="peer ended with status 1"):
        await compared.run(rounds=1, start_limit=60)
    assert [len(side.rounds) for side in compared.sides] == [1, 1]
