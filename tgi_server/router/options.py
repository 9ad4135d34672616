"""The table of generation options: every option of the contract, as each interface has it.

An option is declared as a field in `contract.py`, and every interface accepts it by that name. `_DIFFERENCES` lists the
exceptions. The fields of request bodies with their bounds (`schemas/base.py`), the checks below, and
docs/reference/options.md are made from this table.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from struct import Struct
from typing import Any, get_type_hints

from tgi_server.contract import (
    OPTION,
    Bounds,
    GenerationOptions,
    Option,
    ReportParameters,
    SamplingParameters,
    StoppingParameters,
)
from tgi_server.router.errors import InvalidRequest


class Dialect(Enum):
    """The interfaces by which a request may come. The value is what documentation calls it."""

    TGI = "TGI"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OLLAMA = "Ollama"

    @property
    def prompt(self) -> str:
        """The field that has the prompt."""
        return _PROMPTS[self]


_PROMPTS = {
    Dialect.TGI: "inputs",
    Dialect.CHAT: "messages",
    Dialect.COMPLETIONS: "prompt",
    Dialect.RESPONSES: "input",
    Dialect.MESSAGES: "messages",
    Dialect.OLLAMA: "messages",
}
# The object of a request that has the options; in the other interfaces it is the request itself.
_OBJECTS = {Dialect.TGI: "parameters", Dialect.OLLAMA: "options"}


@dataclass(frozen=True, slots=True)
class Spelling:
    """An option in one interface, with the rules for its values there.

    names: names of its fields; messages about an unset option use the first one. bounds: None: as in the contract.
    note: an addition to its description. default: its value if neither the request nor the model's own defaults set it;
    None: as in the contract. unset: values that mean that it is unset. limit: the server's limit on the number, or on
    the number of texts. at_least, at_most: options whose values bound it. choices: the allowed values; empty: any.

    Values within `free`, or equal to that of `at_least`, may be combined with anything. Other values need one of the
    request's fields `needs`, and all of the server's `abilities`. They are refused together with the options, and the
    members of `BESIDE_OPTIONS`, in `refused_with`; and in streams unless `streams`.
    """

    names: tuple[str, ...] = ()
    bounds: Bounds | None = None
    note: str = ""
    default: float | None = None
    unset: Bounds | None = None
    limit: str = ""
    at_least: str = ""
    at_most: str = ""
    choices: tuple[str, ...] = ()
    free: Bounds | None = None
    needs: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ()
    refused_with: tuple[str, ...] = ()
    streams: bool = True


# What a request may have beside options, in the words of a refusal.
BESIDE_OPTIONS = {"grammar": "a grammar or tools", "images": "images, which cannot be cut"}
_EVERYWHERE = tuple(Dialect)
_OPENAI = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES)
_NOT_TGI = (*_OPENAI, Dialect.MESSAGES, Dialect.OLLAMA)


def _only(*dialects: Dialect, **spelling: Any) -> Any:
    """Returns an option's spelling in these interfaces; the others do not have it."""
    return {dialect: spelling if dialect in dialects else None for dialect in _EVERYWHERE}


def _in(*dialects: Dialect, **spelling: Any) -> Any:
    """Returns an option's spelling in these interfaces; the others have it as the contract does."""
    return dict.fromkeys(dialects, spelling)


def _with_default(spellings: Any, default: float) -> Any:
    """Returns spellings in which Ollama's interface has a default."""
    return {**spellings, Dialect.OLLAMA: {**spellings[Dialect.OLLAMA], "default": default}}


# Options that only shape sampling, which each of them switches on in TGI's interface.
SHAPING = ("temperature", "top_k", "top_p", "typical_p")
# The members of spellings that are the same in all interfaces.
_RULES: Mapping[str, Mapping[str, Any]] = {
    "top_n_tokens": {"limit": "max_top_n_tokens", "free": Bounds(most=0)},
    "prefill_logprobs": {"free": Bounds(most=0)},
    "n": {"limit": "max_client_batch_size"},
    "best_of": {"limit": "max_best_of", "at_least": "n", "free": Bounds(most=1)},
    "stop": {"limit": "max_stop_sequences"},
    "min_tokens": {
        "at_most": "max_new_tokens",
        "refused_with": ("grammar", "allowed_token_ids"),  # which determine where the text ends
        "free": Bounds(most=0),
    },
    "allowed_token_ids": {"abilities": ("grammars",), "refused_with": ("grammar",)},
    "truncate": {"limit": "max_input_tokens", "refused_with": ("images",)},
    "on_timeout": {"choices": ("fail", "partial", "complete")},
    "thinking_token_budget": {
        "names": ("thinking_token_budget", "reasoning_budget"),
        "note": "-1: no bound.",
        "free": Bounds(most=-1),
        "abilities": ("thoughts", "grammars"),
        "refused_with": ("allowed_token_ids",),
    },
}
_DIFFERENCES: Mapping[str, Mapping[Dialect, Mapping[str, Any] | None]] = {
    "do_sample": _only(Dialect.TGI),
    "temperature": _with_default(_in(*_NOT_TGI, bounds=Bounds(least=0), note="0: always the most likely token."), 0.8),
    "top_k": _with_default(_in(*_NOT_TGI, bounds=Bounds(least=-1, most=2**31 - 1), note="0 or -1: all tokens."), 40),
    "top_p": _with_default(
        _in(*_NOT_TGI, bounds=Bounds(least=0, most=1), note="0: always the most likely token."), 0.9
    ),
    "typical_p": {
        **_only(Dialect.TGI),
        **_in(Dialect.OLLAMA, bounds=Bounds(above=0, most=1), note="1: all tokens."),
    },
    "repetition_penalty": _in(Dialect.OLLAMA, names=("repeat_penalty",)),
    "frequency_penalty": _only(Dialect.TGI),
    "count_penalty": _only(*_NOT_TGI, names=("frequency_penalty",)),
    "seed": _in(*_NOT_TGI, bounds=Bounds(least=-(2**63), most=2**64 - 1), note="-1: a random seed."),
    "watermark": _only(Dialect.TGI),
    "max_new_tokens": {
        **_in(Dialect.CHAT, names=("max_completion_tokens", "max_tokens"), bounds=Bounds(least=1, most=2**32 - 1)),
        **_in(
            Dialect.COMPLETIONS,
            names=("max_completion_tokens", "max_tokens"),
            bounds=Bounds(least=0, most=2**32 - 1),
            note="0: none, for `echo` and `logprobs`.",
        ),
        **_in(Dialect.RESPONSES, names=("max_output_tokens",), bounds=Bounds(least=1, most=2**32 - 1)),
        **_in(
            Dialect.MESSAGES,
            names=("max_tokens",),
            bounds=Bounds(least=0, most=2**32 - 1),
            note="Required. 0: none; the prompt is computed for later requests.",
            free=Bounds(least=1),
            streams=False,  # there would be nothing in it
        ),
        **_in(
            Dialect.OLLAMA,
            names=("num_predict",),
            bounds=Bounds(least=-2, most=2**31 - 1),
            note="0, -1 or -2: as many as fit.",
            unset=Bounds(most=0),
        ),
    },
    "top_n_tokens": {
        **_in(Dialect.CHAT, names=("top_logprobs",), note="Needs `logprobs`.", needs=("logprobs",)),
        **_in(Dialect.COMPLETIONS, names=("logprobs",), note="Unset: no log-probabilities."),
        **_in(Dialect.RESPONSES, names=("top_logprobs",), note="Requested by `include`."),
        **dict.fromkeys((Dialect.MESSAGES, Dialect.OLLAMA)),
    },
    "prefill_logprobs": _only(Dialect.TGI, names=("decoder_input_details",), streams=False),
    "n": _only(Dialect.CHAT, Dialect.COMPLETIONS),
    "best_of": {
        **_only(Dialect.COMPLETIONS, streams=False),  # the best one is known at the end only
        # Without sampling, or with a seed, all sequences would be the same.
        **_in(Dialect.TGI, needs=("do_sample", *SHAPING), refused_with=("seed",), streams=False),
    },
    "stop": _in(Dialect.MESSAGES, names=("stop_sequences",)),
    "include_stop": _only(*_OPENAI, names=("include_stop_str_in_output",)),
    "truncate": _in(
        *_NOT_TGI,
        names=("truncate_prompt_tokens",),
        bounds=Bounds(least=-1, most=2**31 - 1),
        note="-1: as many as --max-input-tokens allows.",
    ),
    "adapter_id": _only(Dialect.TGI),
    "prompt_cache_key": _only(*_OPENAI),
}

PARTS = (SamplingParameters, StoppingParameters, ReportParameters, GenerationOptions)
PART_OF = {field.name: place for place, part in enumerate(PARTS) for field in fields(part)}


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option in one interface. part: the class of the contract that has it; option: its name there. rules: its
    spelling. least: the lowest value that the contract allows.
    """

    part: type
    option: str
    type: Any
    default: Any
    names: tuple[str, ...]
    bounds: Bounds
    description: str
    example: object
    rules: Spelling
    least: float | None

    def is_unset(self, value: Any) -> bool:
        """Returns True for a value that leaves the option unset."""
        return self.rules.unset is not None and not self.rules.unset.fault(value)

    def is_free(self, value: Any) -> bool:
        """Returns True for a value to which the rules about other options do not apply."""
        return self.rules.free is not None and not self.rules.free.fault(value)


@cache
def rows(dialect: Dialect) -> tuple[OptionRow, ...]:
    """Returns the options that an interface has."""
    found = (_row(part, field, dialect) for part in PARTS for field in fields(part) if OPTION in field.metadata)
    return tuple(row for row in found if row is not None)


def _row(part: type, field: Field[Any], dialect: Dialect) -> OptionRow | None:
    difference = _DIFFERENCES.get(field.name, {}).get(dialect, {})
    if difference is None:
        return None
    spelling = Spelling(**{**_RULES.get(field.name, {}), **difference})
    entry: Option = field.metadata[OPTION]
    return OptionRow(
        part,
        field.name,
        get_type_hints(part)[field.name],
        {} if field.default is MISSING else field.default,
        spelling.names or (field.name,),
        spelling.bounds or entry.bounds,
        f"{entry.description} {spelling.note}".strip(),
        entry.example,
        spelling,
        entry.bounds.least,
    )


@cache
def options_of(dialect: Dialect) -> Mapping[str, tuple[OptionRow, int]]:
    """Returns the option that each field of an interface sets, and the place of the field among the option's fields."""
    return {name: (row, place) for row in rows(dialect) for place, name in enumerate(row.names)}


@cache
def field_of(option: str, dialect: Dialect) -> str:
    """Returns the path of the first of the fields that set an option."""
    return path_of(next(row.names[0] for row in rows(dialect) if row.option == option), dialect)


def refusal(option: str, dialect: Dialect, fault: str) -> InvalidRequest:
    """Returns the error of an option."""
    return InvalidRequest.at(field_of(option, dialect), fault)


def path_of(name: str, dialect: Dialect) -> str:
    return f"{_OBJECTS[dialect]}.{name}" if dialect in _OBJECTS else name


@cache
def defaults_of(dialect: Dialect) -> Mapping[str, float]:
    """Returns the defaults that an interface has instead of the contract's."""
    return {row.option: row.rules.default for row in rows(dialect) if row.rules.default is not None}


_LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_FLOAT32 = Struct("<f")


def fault_of(bounds: Bounds, value: float) -> str | None:
    """Returns the bound that a number would break if it were sent to the shards, in words; None if it breaks none."""
    if isinstance(value, float):
        if abs(value) > _LARGEST_FLOAT32:
            return f"at most {_LARGEST_FLOAT32:.2g}" if value > 0 else f"at least -{_LARGEST_FLOAT32:.2g}"
        (value,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    return bounds.fault(value)
