"""The table of generation options: every option of the contract, as each interface has it.

An option is declared as a field in `contract.py`, and every interface accepts it by that name. `_DIFFERENCES` lists the
exceptions. The fields of request bodies with their bounds (`schemas/base.py`), the checks below, and
docs/reference/options.md are made from this table.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache, lru_cache
from struct import Struct
from typing import Any, get_type_hints

from pydantic import BaseModel

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
from tgi_server.router.submission import Limits


class Dialect(Enum):
    """The interfaces by which a request may come. The value is what documentation calls it."""

    TGI = "TGI"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"

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
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """An option as one interface has it.

    names: of its fields; a message about an unset option has the first name. bounds: None: as in the contract. note:
    an addition to its description. needs: a field of the request without which it is refused. refused_with: an option
    with which it is refused. streams: it may be used in streams.
    """

    names: tuple[str, ...] = ()
    bounds: Bounds | None = None
    note: str = ""
    needs: str = ""
    refused_with: str = ""
    streams: bool = True


_EVERYWHERE = tuple(Dialect)
_OPENAI = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES)
_NOT_TGI = (*_OPENAI, Dialect.MESSAGES)


def _only(*dialects: Dialect, **spelling: Any) -> Any:
    """Returns an option's spelling in these interfaces; the others do not have it."""
    return {dialect: Spelling(**spelling) if dialect in dialects else None for dialect in _EVERYWHERE}


def _except(*dialects: Dialect, **spelling: Any) -> Any:
    """Returns an option's spelling in these interfaces; the others have it as the contract does."""
    return dict.fromkeys(dialects, Spelling(**spelling))


_DIFFERENCES: Mapping[str, Mapping[Dialect, Spelling | None]] = {
    "do_sample": _only(Dialect.TGI),
    "temperature": _except(*_NOT_TGI, bounds=Bounds(least=0), note="0: always the most likely token."),
    "top_k": _except(*_NOT_TGI, bounds=Bounds(least=-1, most=2**31 - 1), note="0 or -1: all tokens."),
    "top_p": _except(*_NOT_TGI, bounds=Bounds(least=0, most=1), note="0: always the most likely token."),
    "typical_p": _only(Dialect.TGI),
    "frequency_penalty": _only(Dialect.TGI),
    "count_penalty": _only(*_NOT_TGI, names=("frequency_penalty",)),
    "seed": _except(*_NOT_TGI, bounds=Bounds(least=-(2**63), most=2**64 - 1), note="-1: a random seed."),
    "watermark": _only(Dialect.TGI),
    "max_new_tokens": {
        **_except(Dialect.CHAT, names=("max_completion_tokens", "max_tokens"), bounds=Bounds(least=1, most=2**32 - 1)),
        **_except(
            Dialect.COMPLETIONS,
            names=("max_completion_tokens", "max_tokens"),
            bounds=Bounds(least=0, most=2**32 - 1),
            note="0: none, for `echo` and `logprobs`.",
        ),
        **_except(Dialect.RESPONSES, names=("max_output_tokens",), bounds=Bounds(least=1, most=2**32 - 1)),
        **_except(
            Dialect.MESSAGES,
            names=("max_tokens",),
            bounds=Bounds(least=0, most=2**32 - 1),
            note="Required. 0: none; the prompt is computed for later requests.",
            streams=False,  # with 0: there would be nothing in it
        ),
    },
    "top_n_tokens": {
        **_except(Dialect.CHAT, names=("top_logprobs",), note="Needs `logprobs`.", needs="logprobs"),
        **_except(Dialect.COMPLETIONS, names=("logprobs",), note="Unset: no log-probabilities."),
        **_except(Dialect.RESPONSES, names=("top_logprobs",), note="Requested by `include`."),
        Dialect.MESSAGES: None,
    },
    "prefill_logprobs": _only(Dialect.TGI, names=("decoder_input_details",), streams=False),
    "n": _only(Dialect.CHAT, Dialect.COMPLETIONS),
    "best_of": {
        **_only(Dialect.COMPLETIONS, streams=False),  # the best one is known at the end only
        **_except(Dialect.TGI, refused_with="seed", streams=False),  # all sequences would be the same
    },
    "stop": _except(Dialect.MESSAGES, names=("stop_sequences",)),
    "include_stop": _only(*_OPENAI, names=("include_stop_str_in_output",)),
    "truncate": _except(
        *_NOT_TGI,
        names=("truncate_prompt_tokens",),
        bounds=Bounds(least=-1, most=2**31 - 1),
        note="-1: as many as --max-input-tokens allows.",
    ),
    "adapter_id": _only(Dialect.TGI),
    "prompt_cache_key": _only(*_OPENAI),
    "thinking_token_budget": _except(
        *_EVERYWHERE,
        names=("thinking_token_budget", "reasoning_budget"),
        note="-1: no bound.",
        refused_with="allowed_token_ids",
    ),
}

_PARTS = (SamplingParameters, StoppingParameters, ReportParameters, GenerationOptions)
_NO_REPORT = ReportParameters()
_PART_OF = {field.name: place for place, part in enumerate(_PARTS) for field in fields(part)}


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option in one interface. part: the class of the contract that has it; option: its name there."""

    part: type
    option: str
    type: Any
    default: Any
    names: tuple[str, ...]
    bounds: Bounds
    description: str
    example: object
    needs: str
    refused_with: str
    streams: bool


@cache
def rows(dialect: Dialect) -> tuple[OptionRow, ...]:
    """Returns the options that an interface has."""
    found = (_row(part, field, dialect) for part in _PARTS for field in fields(part) if OPTION in field.metadata)
    return tuple(row for row in found if row is not None)


def _row(part: type, field: Field[Any], dialect: Dialect) -> OptionRow | None:
    spelling = _DIFFERENCES.get(field.name, {}).get(dialect, Spelling())
    if spelling is None:
        return None
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
        spelling.needs,
        spelling.refused_with,
        spelling.streams,
    )


@cache
def _options(dialect: Dialect) -> Mapping[str, tuple[str, int]]:
    """Returns the option that each field of an interface sets, and the place of the field among the option's fields."""
    return {name: (row.option, place) for row in rows(dialect) for place, name in enumerate(row.names)}


@cache
def field_of(option: str, dialect: Dialect) -> str:
    """Returns the path of the first of the fields that set an option."""
    return _path(next(row.names[0] for row in rows(dialect) if row.option == option), dialect)


def refusal(option: str, dialect: Dialect, fault: str) -> InvalidRequest:
    """Returns the error of an option."""
    return InvalidRequest.at(field_of(option, dialect), fault)


def _path(name: str, dialect: Dialect) -> str:
    return f"parameters.{name}" if dialect is Dialect.TGI else name


_TOKEN_LISTS = tuple(row.option for row in rows(Dialect.TGI) if row.type == tuple[int, ...])
# Maximum number of characters in a stop sequence.
_LONGEST_STOP = 1_000
_SEED_BITS = 64
_ON_TIMEOUT = ("fail", "partial", "complete")
_LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_FLOAT32 = Struct("<f")
# Options that a limit of the server bounds: their lowest values, and the limits.
_LIMITED = {
    "n": (1, "max_client_batch_size"),
    "best_of": (1, "max_best_of"),
    "top_n_tokens": (0, "max_top_n_tokens"),
}
# Options that only shape sampling, which each of them switches on in TGI's interface.
_SHAPING = ("temperature", "top_k", "top_p", "typical_p")


def fault_of(bounds: Bounds, value: float) -> str | None:
    """Returns the bound that a number would break if it were sent to the shards, in words; None if it breaks none."""
    if isinstance(value, float):
        if abs(value) > _LARGEST_FLOAT32:
            return f"at most {_LARGEST_FLOAT32:.2g}" if value > 0 else f"at least -{_LARGEST_FLOAT32:.2g}"
        (value,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    return bounds.fault(value)


@dataclass(frozen=True, slots=True)
class Given:
    """The options that a request sets, by their names in the contract, and the field that sets each."""

    dialect: Dialect
    values: Mapping[str, Any]
    names: Mapping[str, str]

    @classmethod
    def by(cls, request: BaseModel, dialect: Dialect) -> "Given":
        """Returns the options that are set in the body of a request."""
        values: dict[str, Any] = {}
        names: dict[str, str] = {}
        known = _options(dialect)
        for name in request.model_fields_set & known.keys():
            option, place = known[name]
            first = option not in names or place < known[names[option]][1]
            if first and (value := getattr(request, name)) is not None:
                values[option], names[option] = value, name
        return cls(dialect, values, names)

    def name(self, option: str) -> str:
        """Returns the path of the field that sets an option, or that would."""
        name = self.names.get(option)
        return field_of(option, self.dialect) if name is None else _path(name, self.dialect)


@dataclass(frozen=True, slots=True)
class OptionReader:
    """Makes the options of a request of any interface, and checks them.

    limits: of TGI's interface. defaults: values of sampling options that are not set, in the other interfaces.
    vocab_size: tokens that the model can generate. end_tokens: tokens that end a text.
    """

    limits: Limits
    vocab_size: int
    end_tokens: Sequence[int] = ()
    defaults: Mapping[str, float] | None = None

    def limits_of(self, dialect: Dialect) -> Limits:
        """Returns the limits of an interface."""
        return self.limits if dialect is Dialect.TGI else _openai_limits(self.limits)

    def read(self, request: BaseModel, dialect: Dialect, *, streams: bool = False) -> GenerationOptions:
        """Returns the options that the body of a request sets. streams: its answer does. Raises InvalidRequest."""
        given = Given.by(request, dialect)
        _check_rows(request, given, streams=streams)
        self._check(given)
        chosen = dict(given.values)
        if dialect is not Dialect.TGI:
            chosen = {**(self.defaults or {}), **chosen}
        chosen |= self._derived(chosen, given)
        parts: list[dict[str, Any]] = [{} for _ in _PARTS]
        for name, value in chosen.items():
            parts[_PART_OF[name]][name] = value
        sampling, stopping, report, own = parts
        return GenerationOptions(
            SamplingParameters(**sampling),
            StoppingParameters(**stopping),
            ReportParameters(**report) if report else _NO_REPORT,
            **own,
        )

    def _derived(self, chosen: Mapping[str, Any], given: Given) -> dict[str, Any]:
        """Returns the options whose values differ between the contract and a request."""
        tgi = given.dialect is Dialect.TGI
        lists = {name: tuple(value) for name, value in chosen.items() if isinstance(value, list)}
        seed = chosen.get("seed")
        derived: dict[str, Any] = {
            # Negative seeds are the same bits without a sign.
            "seed": random.getrandbits(_SEED_BITS) if seed is None or (seed == -1 and not tgi) else seed % 2**64,
            **lists,
        }
        if "logit_bias" in chosen:
            derived["logit_bias"] = {int(token): bias for token, bias in chosen["logit_bias"].items()}
        if chosen.get("min_tokens"):
            derived["late_tokens"] = (*self.end_tokens, *lists.get("stop_token_ids", ()))
        if tgi:
            derived["do_sample"] = chosen.get("do_sample", False) or any(name in chosen for name in _SHAPING)
            derived["include_stop"] = True
        else:
            derived["do_sample"] = sampled = chosen.get("temperature") != 0 and chosen.get("top_p") != 0
            if not sampled:
                derived |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
            elif chosen.get("top_k") == -1:
                derived["top_k"] = 0
            if given.dialect is Dialect.COMPLETIONS:
                derived["logprobs"] = "top_n_tokens" in chosen
            if chosen.get("truncate") == -1:
                derived["truncate"] = self.limits.max_input_tokens
        return derived

    def _check(self, given: Given) -> None:
        """Checks the rules that bounds of single options do not cover. Raises InvalidRequest."""
        limits, values, name = self.limits_of(given.dialect), given.values, given.name
        for option, (least, limit) in _LIMITED.items():
            if values.get(option, least) > (most := getattr(limits, limit)):
                raise InvalidRequest.at(name(option), f"is {values[option]}; it must be {least} to {most}")
        if values.get("best_of", n := values.get("n", 1)) < n:
            raise InvalidRequest.at("best_of", f"is {values['best_of']}; it must be at least `n`, which is {n}")
        least, most = values.get("min_tokens", 0), values.get("max_new_tokens")
        if most and least > most:
            raise InvalidRequest.at(
                name("min_tokens"), f"is {least}; it must be at most `{name('max_new_tokens')}`, which is {most}"
            )
        if (action := values.get("on_timeout")) not in (None, *_ON_TIMEOUT):
            raise InvalidRequest.at(name("on_timeout"), f"is {action!r}; it must be {', '.join(_ON_TIMEOUT)}")
        if "stop" in values:
            self._check_texts(values["stop"], name("stop"), limits.max_stop_sequences)
        truncate = values.get("truncate", 1)
        unbounded = truncate == -1 and given.dialect is not Dialect.TGI
        if not (0 < truncate <= limits.max_input_tokens or unbounded):
            also = "" if given.dialect is Dialect.TGI else ", or -1"
            raise InvalidRequest.at(name("truncate"), f"is {truncate}; it must be 1 to {limits.max_input_tokens}{also}")
        self._check_tokens(given)
        if given.dialect is Dialect.TGI:
            self._check_best_of(values)

    def _check_texts(self, texts: Sequence[str], name: str, most: int) -> None:
        if len(texts) > most:
            raise InvalidRequest.at(name, f"has {len(texts)} stop sequences; it may have at most {most}")
        if "" in texts:
            raise InvalidRequest.at(name, "must not have an empty stop sequence")
        if (longest := max(map(len, texts), default=0)) > _LONGEST_STOP:
            raise InvalidRequest.at(name, f"has one of {longest} characters; at most {_LONGEST_STOP} are allowed")

    def _check_tokens(self, given: Given) -> None:
        last = self.vocab_size - 1
        for option in _TOKEN_LISTS:
            for token in given.values.get(option, ()):
                if token > last:
                    raise InvalidRequest.at(given.name(option), f"has {token}; token ids are 0 to {last}")
        for token in given.values.get("logit_bias", ()):
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) <= last):
                raise InvalidRequest.at(
                    given.name("logit_bias"), f"has the name {token[:20]!r}; token ids are 0 to {last}"
                )

    def _check_best_of(self, values: Mapping[str, Any]) -> None:
        """Checks whether several sequences may be generated for one text. Raises InvalidRequest."""
        several = values.get("best_of", 1) > 1
        if several and not (values.get("do_sample") or any(name in values for name in _SHAPING)):
            raise refusal("best_of", Dialect.TGI, "needs sampling: set `do_sample`, or a temperature")


@lru_cache(maxsize=8)
def _openai_limits(limits: Limits) -> Limits:
    return limits.of_openai()


def _check_rows(request: BaseModel, given: Given, *, streams: bool) -> None:
    """Raises InvalidRequest when an option has two values, by different names, or breaks a rule of its row."""
    # Values with which an option may stand beside any other.
    unused = {
        "best_of": given.values.get("n", 1),
        "top_n_tokens": 0,
        "prefill_logprobs": False,
        "max_new_tokens": given.values.get("max_new_tokens") or None,  # any but 0
    }
    for row in rows(given.dialect):
        if row.option not in given.values:
            continue
        values = {name: value for name in row.names if (value := getattr(request, name)) is not None}
        if len(values) > 1 and len(set(values.values())) > 1:
            (one, first), (other, second) = values.items()
            raise InvalidRequest.at(_path(other, given.dialect), f"is {second} and `{one}` is {first}; give one")
        if given.values[row.option] == unused.get(row.option):
            continue
        if streams and not row.streams:
            verb = "used" if given.values[row.option] else "0"
            raise InvalidRequest.at(given.name(row.option), f"cannot be {verb} when streaming")
        if row.needs and not getattr(request, row.needs):
            raise InvalidRequest.at(given.name(row.option), f"needs `{row.needs}`")
        if row.refused_with and given.values.get(row.refused_with) not in (None, []):
            raise InvalidRequest.at(given.name(row.option), f"cannot be used with `{given.name(row.refused_with)}`")
