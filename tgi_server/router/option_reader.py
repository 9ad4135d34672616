"""Reads the generation options of a request, by the table in `options.py`, and checks the rules of that."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from typing import Any

from pydantic import BaseModel

from tgi_server.contract import GenerationOptions, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.limits import Limits
from tgi_server.router.options import (
    BESIDE_OPTIONS,
    PART_OF,
    PARTS,
    SHAPING,
    Dialect,
    OptionRow,
    defaults_of,
    field_of,
    options_of,
    path_of,
    refusal,
    rows,
)

# Maximum number of characters in a stop sequence.
_LONGEST_STOP = 1_000
_SEED_BITS = 64
_NO_REPORT = ReportParameters()


@dataclass(frozen=True, slots=True)
class Given:
    """The options that a request sets, by their names in the contract, and the field that sets each."""

    dialect: Dialect
    values: Mapping[str, Any]
    names: Mapping[str, str]

    @classmethod
    def by(
        cls, request: BaseModel, dialect: Dialect, elsewhere: Mapping[str, tuple[str, Any]] | None = None
    ) -> "Given":
        """Returns the options that are set in the body of a request. elsewhere: the paths and values of fields that set
        options which the fields of the table do not set.
        """
        values: dict[str, Any] = {}
        names: dict[str, str] = {}
        known = options_of(dialect)
        for name in request.model_fields_set & known.keys():
            row, place = known[name]
            first = row.option not in names or place < known[names[row.option]][1]
            if first and (value := getattr(request, name)) is not None and not row.is_unset(value):
                values[row.option], names[row.option] = value, name
        for option, (path, value) in (elsewhere or {}).items():
            if option not in values and value is not None:
                values[option], names[option] = value, path
        return cls(dialect, values, names)

    def name(self, option: str) -> str:
        """Returns the path of the field that sets an option, or that would."""
        name = self.names.get(option)
        return field_of(option, self.dialect) if name is None else path_of(name, self.dialect)


@dataclass(frozen=True, slots=True)
class OptionReader:
    """Reads and checks the options of requests of all interfaces.

    limits: the limits of TGI's interface. defaults: values of unset sampling options in the other interfaces.
    vocab_size: number of tokens that the model can generate. end_tokens: ids of the tokens that end a text.
    """

    limits: Limits
    vocab_size: int
    end_tokens: Sequence[int] = ()
    defaults: Mapping[str, float] | None = None

    def limits_of(self, dialect: Dialect) -> Limits:
        """Returns the limits of an interface."""
        return self.limits if dialect is Dialect.TGI else _openai_limits(self.limits)

    def read(
        self,
        request: BaseModel,
        dialect: Dialect,
        *,
        streams: bool = False,
        lowest_priority: float = -inf,
        elsewhere: Mapping[str, tuple[str, Any]] | None = None,
    ) -> GenerationOptions:
        """Returns the options that the body of a request sets. Raises InvalidRequest.

        streams: True if the answer is streamed. lowest_priority: the lowest number that the request's priority may
        have.
        elsewhere: see `Given.by`.
        """
        given = Given.by(request, dialect, elsewhere)
        for row in rows(dialect):
            if row.option in given.values:
                _check_names(row, request, dialect)
                self._check_value(row, given)
                _check_company(row, request, given, streams=streams)
        if (priority := given.values.get("priority", 0)) < lowest_priority:
            fault = f"is {priority}; the lowest that this request may have is {lowest_priority} (--max-priority)"
            raise InvalidRequest.at(given.name("priority"), fault)
        chosen = dict(given.values)
        if dialect is not Dialect.TGI:
            chosen = {**defaults_of(dialect), **(self.defaults or {}), **chosen}
        chosen |= self._derived(chosen, given)
        parts: list[dict[str, Any]] = [{} for _ in PARTS]
        for name, value in chosen.items():
            parts[PART_OF[name]][name] = value
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
            derived["do_sample"] = chosen.get("do_sample", False) or any(name in chosen for name in SHAPING)
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

    def _check_value(self, row: OptionRow, given: Given) -> None:
        """Checks what the bounds of the option do not cover. Raises InvalidRequest."""
        value = given.values[row.option]
        if row.type == tuple[str, ...]:
            fault = self._texts_fault(value, getattr(self.limits_of(given.dialect), row.rules.limit))
        elif row.type in (tuple[int, ...], dict[int, float]):
            fault = self._tokens_fault(value)
        else:
            fault = self._fault(row, given, value)
        if fault is not None:
            raise InvalidRequest.at(given.name(row.option), fault)

    def _fault(self, row: OptionRow, given: Given, value: Any) -> str | None:
        rules = row.rules
        if rules.choices and value not in rules.choices:
            return f"is {value!r}; it must be {', '.join(rules.choices)}"
        if rules.limit and not (value == row.bounds.least == -1):
            most = getattr(self.limits_of(given.dialect), rules.limit)
            if not (row.least or 0) <= value <= most:
                return f"is {value}; it must be {row.least} to {most}{', or -1' if row.bounds.least == -1 else ''}"
        if (other := given.values.get(rules.at_least)) and value < other:
            return f"is {value}; it must be at least `{given.name(rules.at_least)}`, which is {other}"
        if (other := given.values.get(rules.at_most)) and value > other:
            return f"is {value}; it must be at most `{given.name(rules.at_most)}`, which is {other}"
        return None

    def _texts_fault(self, texts: Sequence[str], most: int) -> str | None:
        if len(texts) > most:
            return f"has {len(texts)} stop sequences; it may have at most {most}"
        if "" in texts:
            return "must not have an empty stop sequence"
        if (longest := max(map(len, texts), default=0)) > _LONGEST_STOP:
            return f"has one of {longest} characters; at most {_LONGEST_STOP} are allowed"
        return None

    def _tokens_fault(self, tokens: Iterable[int | str]) -> str | None:
        """tokens: ids, or names that should be ids."""
        last = self.vocab_size - 1
        for token in tokens:
            if isinstance(token, int):
                if token > last:
                    return f"has {token}; token ids are 0 to {last}"
            elif not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) <= last):
                return f"has the name {token[:20]!r}; token ids are 0 to {last}"
        return None


@lru_cache(maxsize=8)
def _openai_limits(limits: Limits) -> Limits:
    return limits.of_openai()


def _check_names(row: OptionRow, request: BaseModel, dialect: Dialect) -> None:
    """Raises InvalidRequest when an option has two values, by different names."""
    values = {name: value for name in row.names if (value := getattr(request, name)) is not None}
    if len(values) > 1 and len(set(values.values())) > 1:
        (one, first), (other, second) = values.items()
        raise InvalidRequest.at(path_of(other, dialect), f"is {second} and `{one}` is {first}; give one")


def _check_company(row: OptionRow, request: BaseModel, given: Given, *, streams: bool) -> None:
    """Raises InvalidRequest when an option cannot be used with others, without others, or in a stream."""
    rules, value = row.rules, given.values[row.option]
    if row.is_free(value) or value == given.values.get(rules.at_least):
        return
    fault = ""
    if streams and not rules.streams:
        fault = f"cannot be {'used' if value else '0'} when streaming"
    elif rules.needs and not any(getattr(request, name) for name in rules.needs):
        names = ", ".join(f"`{path_of(name, given.dialect)}`" for name in rules.needs)
        fault = f"needs {'one of ' if len(rules.needs) > 1 else ''}{names}"
    elif others := [other for other in rules.refused_with if given.values.get(other) not in (None, [])]:
        fault = f"cannot be used with `{given.name(others[0])}`"
    if fault:
        raise InvalidRequest.at(given.name(row.option), fault)


@cache
def _rows_with_company(dialect: Dialect) -> tuple[OptionRow, ...]:
    """Returns the options that `check_company` checks."""
    return tuple(row for row in rows(dialect) if row.rules.abilities or BESIDE_OPTIONS.keys() & row.rules.refused_with)


def check_company(
    options: GenerationOptions, dialect: Dialect, beside: Collection[str], lacking: Mapping[str, str]
) -> None:
    """Raises InvalidRequest for an option that cannot be used with the rest of the request, or on this server.

    beside: the members of `BESIDE_OPTIONS` that the request has. lacking: abilities that the server lacks, and why.
    """
    parts = dict(zip(PARTS, (options.sampling, options.stopping, options.report, options), strict=True))
    for row in _rows_with_company(dialect):
        value = getattr(parts[row.part], row.option)
        if value == row.default or row.is_free(value):
            continue
        for other in row.rules.refused_with:
            if other in beside:
                raise refusal(row.option, dialect, f"cannot be used with {BESIDE_OPTIONS[other]}")
        for ability in row.rules.abilities:
            if ability in lacking:
                raise refusal(row.option, dialect, f"cannot be used: {lacking[ability]}")
