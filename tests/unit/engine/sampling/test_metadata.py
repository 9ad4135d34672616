from typing import Any

import torch

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling.metadata import MetadataBuilder, Row, is_greedy, is_plain, most_logits, top_logits

CPU = torch.device("cpu")
SILENT = ReportParameters()


def row(parameters: SamplingParameters, report: ReportParameters = SILENT, slot: int | None = None) -> Row:
    return Row(parameters, report, prompt_length=3, sequence_slot=slot, generated_slot=None)


def test_a_plain_request_wants_the_largest_logit_and_nothing_else() -> None:
    assert is_plain(SamplingParameters(temperature=0.3, top_k=5), SILENT)
    assert not is_plain(SamplingParameters(), ReportParameters(logprobs=True))
    assert is_greedy(SamplingParameters())
    for parameters in (
        SamplingParameters(do_sample=True),
        SamplingParameters(watermark=True),
        SamplingParameters(logit_bias={1: 2.0}),
        SamplingParameters(repetition_penalty=1.1),
        SamplingParameters(presence_penalty=0.1),
    ):
        assert not is_greedy(parameters)


def test_a_request_with_top_k_needs_that_many_logits_unless_a_rule_changes_their_order() -> None:
    def needed(report: ReportParameters = SILENT, **settings: Any) -> int | None:
        return top_logits(SamplingParameters(**settings), report)

    assert needed() == needed(temperature=0.3, top_k=5) == 1
    assert needed(do_sample=True, top_k=5, top_p=0.5, min_p=0.1) == 5
    assert needed(ReportParameters(logprobs=True, top_n_tokens=9), do_sample=True, top_k=5) == 5
    assert needed(ReportParameters(logprobs=True)) is None
    assert needed(do_sample=True) is None
    assert needed(ReportParameters(scored_token_ids=(3,)), do_sample=True, top_k=5) is None
    for settings in ({"watermark": True}, {"logit_bias": {1: 2.0}}, {"repetition_penalty": 1.1}, {"min_tokens": 2}):
        assert needed(do_sample=True, top_k=5, **settings) is None
    assert (most_logits([]), most_logits([1, 7, 3]), most_logits([7, None])) == (1, 7, None)


def test_rules_name_the_rows_that_they_concern() -> None:
    state = {
        4: row(SamplingParameters(do_sample=True, top_k=7, seed=2**64 - 1)),
        6: row(SamplingParameters(repetition_penalty=1.5, logit_bias={9: -2.0}), slot=1),
        7: row(SamplingParameters(do_sample=True, temperature=0.5), ReportParameters(top_n_tokens=2)),
    }
    (metadata,) = MetadataBuilder(10, CPU).build([3, 4, 6, 7], state)
    assert metadata.processed.index is not None
    assert metadata.processed.index.tolist() == [1, 2, 3]
    assert metadata.state_rows.tolist() == [4, 6, 7]
    assert metadata.prompt_lengths.tolist() == [3, 3, 3]
    assert metadata.repetition is not None
    assert metadata.repetition.slots.tolist() == [1]
    assert metadata.repetition.rule.row_index.index.tolist() == [1]
    assert metadata.bias is not None
    assert metadata.bias.places.tolist() == [10 + 9]
    assert metadata.sampling is not None
    assert metadata.sampling.row_index.index.tolist() == [0, 2]
    assert metadata.sampling.seeds.tolist() == [-1, 0]
    assert metadata.sampling.top_k.largest == 7
    assert metadata.sampling.temperature.values.tolist() == [[0.5]]
    assert metadata.top_tokens is not None
    assert (metadata.top_tokens.positions, metadata.top_tokens.counts) == ((3,), (2,))
    assert metadata.frequency is metadata.presence is metadata.count is metadata.watermark is metadata.logprobs is None


def test_rows_that_an_argmax_is_enough_for_have_no_metadata() -> None:
    assert MetadataBuilder(10, CPU).build([1, 2], {5: row(SamplingParameters(do_sample=True))}) == ()


def test_large_batches_come_in_pieces() -> None:
    builder = MetadataBuilder(2**17, CPU)
    rows = list(range(4 * torch.get_num_threads()))
    pieces = builder.build(rows, {index: row(SamplingParameters(do_sample=True)) for index in rows})
    assert len(pieces) == 4
    assert torch.cat([piece.state_rows for piece in pieces]).tolist() == rows
