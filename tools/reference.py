"""Writes docs from the code: compatibility.md, metrics.md, pages of reference/, a chart; `--check` compares only."""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from pydantic import BaseModel

from llm_functionalities.metrics import ServiceMetrics
from llm_functionalities.settings import Settings as FrontSettings
from shared.foreign_flags import FOREIGN_FLAGS
from shared.help import described
from shared.settings import ServiceSettings, help_groups
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.metrics import TGI_COUNTERS, Metrics
from tgi_server.router.model_metrics import ModelMetrics
from tgi_server.router.options import Dialect, OptionRow, rows
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.schemas.messages import MessagesRequest
from tgi_server.router.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from tgi_server.router.schemas.responses import ResponsesRequest
from tgi_server.shard.settings import DownloadSettings, QuantizeSettings
from tools.chart import chart
from tools.members import members_table

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_BODIES: dict[Dialect, tuple[type[BaseModel], str]] = {
    Dialect.TGI: (GenerateParameters, "`parameters` of `/generate`, `/generate_stream` and `/`"),
    Dialect.CHAT: (ChatRequest, "`/v1/chat/completions`"),
    Dialect.COMPLETIONS: (CompletionRequest, "`/v1/completions`"),
    Dialect.RESPONSES: (ResponsesRequest, "`/v1/responses`"),
    Dialect.MESSAGES: (MessagesRequest, "`/v1/messages`"),
    Dialect.OLLAMA: (OllamaOptions, "`options` of `/api/chat` and `/api/generate`"),
}
_HEAD = """# Generation options

This page is generated (`make reference`) from the fields of `tgi_server/contract.py`, the table in
`tgi_server/router/options.py`, and the request bodies in `tgi_server/router/schemas/`.

Each option is declared once. The first table has its name in each interface; a dash means that the interface does not
have it. `null` means that an option is not set.

"""


_MEMBERS_HEAD = """# Members of requests

This page is generated (`make reference`) from the request bodies in `tgi_server/router/schemas/`. It lists the members
of requests of OpenAI's and Anthropic's interfaces, object by object; [generation options](options.md) are elsewhere.
`null` means that a member is omitted.

What is left out is named in the header `x-ignored-fields`; with `--strict-fields` it is refused.
"""


def members_page() -> str:
    """Returns the page of the members of requests other than generation options."""
    parts = [_MEMBERS_HEAD]
    for dialect, (model, routes) in _BODIES.items():
        if dialect not in (Dialect.TGI, Dialect.OLLAMA):  # whose options are in an object
            options = [name for row in rows(dialect) for name in row.names]
            parts.append(f"## {routes}\n\n{members_table(model, options)}\n")
    parts.append(f"## `/api/chat`\n\n{members_table(OllamaChatRequest)}\n")
    parts.append(f"## `/api/generate`\n\n{members_table(OllamaGenerateRequest)}\n")
    return "\n".join(parts)


_PROGRAMS: dict[str, type[ServiceSettings]] = {
    "text-generation-launcher": LauncherSettings,
    "llm-functionalities": FrontSettings,
    "text-generation-server download-weights": DownloadSettings,
    "text-generation-server quantize": QuantizeSettings,
    "text-generation-benchmark": BenchmarkSettings,
}
_FLAGS_HEAD = """# Flags and variables

This page is generated (`make reference`) from the programs' settings; `--help` of each prints the same. A flag may also
be given as the variable; a flag wins over a variable.
"""


_FOREIGN_HEAD = """## Flags of vLLM, SGLang and llama.cpp

A program that gets one of these ends with the answer.

| flag | answer |
|---|---|"""


def flags_page() -> str:
    """Returns the page of all programs' settings."""
    parts = [_FLAGS_HEAD]
    for program, settings in _PROGRAMS.items():
        parts.append(f"## {program}\n\n{' '.join((settings.__doc__ or '').split())}\n")
        for title, entries in described(settings, *help_groups(settings)).items():
            if entries:
                lines = [f"### {title}\n", "| flag | variable | what it does |", "|---|---|---|"]
                lines += [f"| `{_cell(flags)}` | `{variable}` | {_cell(text)} |" for flags, variable, text in entries]
                parts.append("\n".join(lines) + "\n")
    answers: dict[str, list[str]] = {}
    for flag, answer in FOREIGN_FLAGS.items():
        answers.setdefault(answer, []).append(f"`{flag}`")
    lines = [f"| {', '.join(flags)} | {_cell(answer)} |" for answer, flags in answers.items()]
    return "\n".join([*parts, _FOREIGN_HEAD, *lines]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def options_page() -> str:
    """Returns the page of generation options."""
    found = {dialect: {row.option: row for row in rows(dialect)} for dialect in Dialect}
    options = dict.fromkeys(option for dialect in Dialect for option in found[dialect])
    lines = [
        f"| option | {' | '.join(dialect.value for dialect in Dialect)} |",
        f"|---|{'---|' * len(Dialect)}",
    ]
    for option in options:
        names = (_names(found[dialect].get(option)) for dialect in Dialect)
        lines.append(f"| {option} | {' | '.join(names)} |")
    parts = [_HEAD + "\n".join(lines)]
    for dialect in Dialect:
        parts.append("\n".join(_section(dialect)))
    return "\n\n".join(parts) + "\n"


def _names(row: OptionRow | None) -> str:
    return "-" if row is None else ", ".join(f"`{name}`" for name in row.names)


def _section(dialect: Dialect) -> Iterator[str]:
    model, routes = _BODIES[dialect]
    yield f"## {routes}\n"
    yield "| field | type | bounds | default | what it does |"
    yield "|---|---|---|---|---|"
    options = {name for row in rows(dialect) for name in row.names}
    for row in rows(dialect):
        yield f"| {_names(row)} | {_TYPES[row.type]} | {_bounds(row)} | {_default(row)} | {row.description} |"
    others = {field.alias or name: field for name, field in model.model_fields.items() if name not in options}
    if described := [(name, field.description) for name, field in others.items() if field.description]:
        yield "\n| further field | what it does |"
        yield "|---|---|"
        for name, text in described:
            yield f"| `{name}` | {text} |"
    if refused := sorted(getattr(model, "refused", {})):
        yield f"\nRefused by name, unless they ask for nothing: {', '.join(f'`{name}`' for name in refused)}."
    if harmless := sorted(getattr(model, "harmless", ())):
        yield f"\nAccepted without effect: {', '.join(f'`{name}`' for name in harmless)}."


_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict[int, float]: "object",
    tuple[str, ...]: "list of strings",
    tuple[int, ...]: "list of integers",
    str | None: "string",
    int | None: "integer",
}


def _default(row: OptionRow) -> str:
    """Returns the default as a value, or in words if the contract's value means nothing to a client."""
    if row.rules.default is not None:
        return f"`{row.rules.default}`"
    if isinstance(row.default, bool):
        return f"`{str(row.default).lower()}`"
    if "unset:" in row.description.lower():
        return "unset"
    return "`1`" if row.option == "n" else "off"


def _bounds(row: OptionRow) -> str:
    """Returns the bounds in words; of a text, those of its length."""
    bounds = row.bounds
    low = _bound(bounds.least if bounds.above is None else bounds.above)
    high = _bound(bounds.most if bounds.below is None else bounds.below)
    sides = (
        f"{'at least' if bounds.above is None else 'above'} {low}" if low else "",
        f"{'at most' if bounds.below is None else 'below'} {high}" if high else "",
    )
    unit = " characters" if row.type == str | None and low else ""
    return ", ".join(filter(None, sides)) + unit


def _bound(value: float | None) -> str:
    if value is None:
        return ""
    for bits in (31, 32, 63, 64):
        if abs(value) == 2**bits or value == 2**bits - 1:
            return f"{'-' if value < 0 else ''}2^{bits}{'' if abs(value) == 2**bits else ' - 1'}"
    return str(value)


_PROGRAMS_REPLACED = (
    (
        "Text Generation Inference 3.3, `text-generation`, `huggingface_hub`",
        "flags, variables, ports, routes, metrics, SageMaker's and Vertex AI's routes",
        "[coming from TGI](coming-from-tgi.md#where-responses-differ)",
    ),
    (
        "OpenAI's API: `openai`, LangChain",
        "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/embeddings`, `/v1/models`",
        "[options](reference/options.md), [members of requests](reference/members.md)",
    ),
    (
        "Anthropic's API: `anthropic`",
        "`/v1/messages`, `/v1/messages/count_tokens`",
        "[options](reference/options.md#v1messages), [members of requests](reference/members.md#v1messages)",
    ),
    (
        "vLLM",
        "its additional fields below `/v1/`, loading of adapters, the metrics that inference gateways read",
        "[coming from vLLM](coming-from-vllm.md)",
    ),
    (
        "Ollama: `ollama`, Home Assistant",
        "`/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`, `/api/show`, `/api/ps`, `/api/version`; GGUF files",
        "[coming from Ollama](coming-from-ollama.md#ollamas-routes)",
    ),
    ("llama.cpp", "GGUF files; not its own routes", "[coming from llama.cpp](coming-from-ollama.md)"),
    (
        "Text Embeddings Inference, Jina, Cohere",
        "`/embed`, `/rerank`, `/predict`, `/v1/rerank`, `/v2/rerank`",
        "[embeddings and ranking](embeddings.md)",
    ),
)
_COMPATIBILITY_HEAD = """# Compatibility

This page is generated (`make reference`).

| program, or its clients | what works unchanged | where it differs |
|---|---|---|
{programs}

## Generation options

The name of an option is that of the first interface that has it; others may call it differently, such as `max_tokens`
for `max_new_tokens`. [All names, bounds and defaults](reference/options.md).

| interfaces | options |
|---|---|
"""


def compatibility_page() -> str:
    """Returns the page that shows users of other servers which of their features work."""
    groups: dict[tuple[str, ...], list[str]] = {}
    found = {dialect: {row.option: row for row in rows(dialect)} for dialect in Dialect}
    for option in dict.fromkeys(option for dialect in Dialect for option in found[dialect]):
        having = [dialect for dialect in Dialect if option in found[dialect]]
        names = tuple(dialect.value for dialect in having)
        groups.setdefault(names, []).append(f"`{found[having[0]][option].names[0]}`")
    lines = [
        f"| {'all' if len(names) == len(Dialect) else ', '.join(names)} | {', '.join(options)} |"
        for names, options in sorted(groups.items(), key=lambda group: -len(group[0]))
    ]
    programs = "\n".join(f"| {' | '.join(row)} |" for row in _PROGRAMS_REPLACED)
    parts = [_COMPATIBILITY_HEAD.format(programs=programs) + "\n".join(lines)]
    parts.append(
        "Unknown fields are ignored, and the header `x-ignored-fields` names them. Known fields that would change the "
        "answer and\nare not supported are refused by name; [each interface](reference/options.md) has a list of these."
    )
    refused = help_groups(LauncherSettings)[1]
    flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in refused)
    parts.append(f"Flags of TGI that are refused, with the reason: {flags}.")
    return "\n\n".join(parts) + "\n"


_METRICS_HEAD = """# Metrics

This page is generated (`make reference`) from the code. The format is Prometheus' text format. Durations are in
seconds, lengths in tokens. Counters end with `_total`, except for those that TGI has, which keep TGI's names.

Kubernetes' inference gateways (Gateway API Inference Extension, llm-d) choose a server by the `vllm:` metrics. Their
names and meanings are those of the extension's model server protocol, so the gateway needs no extra flags.
"""


def _exposed_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" and metric.name not in TGI_COUNTERS else metric.name


def metrics_page() -> str:
    """Returns the page of all metrics."""
    front = ServiceMetrics()
    sections = {
        "Router: `/metrics`, also on `--prometheus-port`": Metrics().described(),
        "Router of [several models](several-models.md)": list(ModelMetrics([]).registry.collect()),
        "`llm-functionalities`: `--metrics-port`": list(front.registry.collect()),
    }
    parts = [_METRICS_HEAD]
    for title, metrics in sections.items():
        lines = [f"## {title}\n", "| metric | type | what it is |", "|---|---|---|"]
        lines += (f"| `{_exposed_name(each)}` | {each.type} | {each.documentation} |" for each in metrics)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    pages = {
        FOLDER / "options.md": options_page(),
        FOLDER / "flags.md": flags_page(),
        FOLDER / "members.md": members_page(),
        FOLDER.parent / "compatibility.md": compatibility_page(),
        FOLDER.parent / "metrics.md": metrics_page(),
        FOLDER.parent / "images" / "speed.svg": chart(),
    }
    for page, text in pages.items():
        if "--check" not in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            page.write_text(text)
        elif not page.exists() or page.read_text() != text:
            sys.exit(f"{page} is not up to date; run `make reference`")


if __name__ == "__main__":
    main()
