"""What the host knows of one row of the sampler."""

from dataclasses import dataclass, field

from tgi_server.contract import ReportParameters, SamplingParameters


@dataclass(frozen=True, slots=True)
class Row:
    """A row's request. sequence_slot: counts of prompt and generated tokens; generated_slot: of generated ones.

    only_reported: it is greedy, and no more is asked of it than how likely its tokens are.
    """

    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    report: ReportParameters = field(default_factory=ReportParameters)
    prompt_length: int = 0
    sequence_slot: int | None = None
    generated_slot: int | None = None
    only_reported: bool = False


# The row of a request that wants the token with the highest logit and nothing else.
PLAIN = Row()


def is_plain(parameters: SamplingParameters, report: ReportParameters) -> bool:
    """Whether a request wants the token with the highest logit and nothing else."""
    return is_greedy(parameters) and not (report.logprobs or report.top_n_tokens)


def is_greedy(parameters: SamplingParameters) -> bool:
    """Whether the token with the highest logit is taken, as the model gives it."""
    return not (
        parameters.do_sample
        or parameters.watermark
        or parameters.logit_bias
        or counts_sequence(parameters)
        or counts_generated(parameters)
    )


def counts_sequence(parameters: SamplingParameters) -> bool:
    return parameters.repetition_penalty != 1.0 or parameters.frequency_penalty != 0.0


def counts_generated(parameters: SamplingParameters) -> bool:
    return parameters.presence_penalty != 0.0
