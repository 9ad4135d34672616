"""Requests that want everything there is to want, for tests in which two ways must come to the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tgi_server.contract import Grammar, GrammarKind, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.driver import Driver, Output

SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kind": {"enum": ["a red brick", "a green bottle"]},
                "count": {"type": "integer"},
            },
            "required": ["name", "kind", "count"],
        }
    ),
)
# What a request may want, by name.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with log-probabilities": {"report": ReportParameters(logprobs=True)},
    "greedy with reports": {"report": ReportParameters(logprobs=True, top_n_tokens=2, prefill_logprobs=True)},
    "sampled": {"sampling": SamplingParameters(do_sample=True, temperature=1.2, top_k=20, seed=3)},
    "sampled with reports": {
        "sampling": SamplingParameters(do_sample=True, top_p=0.8, seed=4),
        "report": ReportParameters(logprobs=True, top_n_tokens=3),
    },
    "sampled otherwise": {"sampling": SamplingParameters(do_sample=True, typical_p=0.9, min_p=0.02, seed=11)},
    "penalties": {
        "sampling": SamplingParameters(
            repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5, count_penalty=0.4
        ),
        "report": ReportParameters(logprobs=True),
    },
    "sampled penalties": {
        "sampling": SamplingParameters(do_sample=True, repetition_penalty=1.2, presence_penalty=0.3, seed=9)
    },
    "watermark": {"sampling": SamplingParameters(do_sample=True, watermark=True, seed=5)},
    "greedy watermark": {"sampling": SamplingParameters(watermark=True)},
    "bias": {"sampling": SamplingParameters(logit_bias={77: 3.0, 5: -2.0})},
    "late end": {"sampling": SamplingParameters(min_tokens=9, late_tokens=(2, 5))},
    "grammar": {"grammar": SCHEMA},
    "sampled grammar": {"grammar": SCHEMA, "sampling": SamplingParameters(do_sample=True, temperature=2.0, seed=6)},
    "grammar with reports": {"grammar": SCHEMA, "report": ReportParameters(logprobs=True, top_n_tokens=2)},
    "endless grammar": {"grammar": Grammar(GrammarKind.REGEX, "([a-d] )+"), "ignore_eos": True},
}
# Requests that join in one step; and the tokens that a request has written when it is preempted, or a few more.
_TOGETHER = 9
_TOKENS_BEFORE = 6


def of_every_kind(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[RunningSequence]:
    """Returns a request of each kind for each prompt. lengths: the most new tokens of each prompt."""
    return [
        RunningSequence(
            kind * len(prompts) + place,
            prompt,
            StoppingParameters(new, options.get("ignore_eos", False)),
            **{name: option for name, option in options.items() if name != "ignore_eos"},
        )
        for kind, options in enumerate(KINDS.values())
        for place, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
    ]


def run_overlapping(driver: Driver, sequences: Sequence[RunningSequence], preempted: int = 0) -> dict[int, Output]:
    """Runs requests that join little by little. Returns their outputs, by request id.

    preempted: one of so many leaves after some steps, and comes back with what it has written; 0: none does.
    """
    waiting, outputs = list(sequences), {sequence.request_id: Output() for sequence in sequences}
    leaving = [each for place, each in enumerate(sequences, start=1) if preempted and place % preempted == 0]
    while waiting or driver.busy:
        for sequence in waiting[:_TOGETHER]:
            driver.add(sequence)
        del waiting[:_TOGETHER]
        for generation in driver.step():
            outputs[generation.request_id].generations.append(generation)
        due = [each for each in leaving if each.generated >= _TOKENS_BEFORE]
        leaving = [each for each in leaving if each not in due]
        again = [resumed(each) for each in due if not each.ended]
        driver.leave(*(each.request_id for each in again))
        waiting += again
    return outputs


def resumed(sequence: RunningSequence) -> RunningSequence:
    """Returns the request as it comes back after it was preempted."""
    return RunningSequence(
        sequence.request_id,
        sequence.input_ids,
        sequence.stopping,
        sequence.sampling,
        replace(sequence.report, prefill_logprobs=False),
        grammar=sequence.grammar,
        thought_budget=sequence.thought_budget,
        generated_ids=list(sequence.generated_ids),
        adapter_id=sequence.adapter_id,
        earlier_reply=sequence.earlier_reply,
    )


def compare(actual: Mapping[int, Output], expected: Mapping[int, Output]) -> None:
    """Raises AssertionError unless requests got the same tokens, and the same was told of them."""
    for index, output in actual.items():
        wanted = expected[index]
        assert (output.tokens, output.finish_reason) == (wanted.tokens, wanted.finish_reason), f"request {index}"
        (tops, logprobs), (expected_tops, expected_logprobs) = _reports(output), _reports(wanted)
        assert tops == expected_tops, f"request {index}"
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3), f"request {index}"


def _reports(output: Output) -> tuple[list[list[int]], list[float]]:
    """Returns prompts and likely tokens, and log-probabilities, as they were reported; none of forced tokens."""
    tops, logprobs = [], []
    for generation in output.generations:
        if generation.prompt_tokens is not None:
            tops.append(generation.prompt_tokens.ids)
            logprobs += generation.prompt_tokens.logprobs[1:]
        if generation.top_tokens is not None and len(generation.top_tokens.ids) > 1:
            tops.append(generation.top_tokens.ids)
            logprobs += generation.top_tokens.logprobs
        if generation.logprob is not None and generation.logprob < 0.0:
            logprobs.append(generation.logprob)
    return tops, logprobs
