"""The tools that an answer may call, and the form of such an answer."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.answers.call_reader import CallHeads, CallReader
from tgi_server.router.answers.formats import TGI_FORMAT, ToolFormat
from tgi_server.router.answers.frame import Calls, FrameWriter
from tgi_server.router.answers.reader import AnswerReader, TextReader
from tgi_server.router.answers.reasoning import ReasoningTags
from tgi_server.router.answers.response_template import ResponseTemplate
from tgi_server.router.answers.schema_reading import CLOSED_OBJECTS, JSON_SCHEMA, with_closed_objects
from tgi_server.router.answers.tagged_arguments import Arguments, TaggedParameter, tagged_parameters
from tgi_server.router.answers.templated_reader import TemplatedReader
from tgi_server.router.errors import InvalidTool

TGI_TOOL_PROMPT = (
    "You may call one of the functions above. If one of them helps, answer with JSON only, which names it and has a "
    "value of its own for each argument, and no placeholders: "
    '{"function": {"_name": "NAME", "_arguments": {"ARGUMENT": "VALUE"}}}'
)

# Number of last characters of a prompt that can contain the beginning of the answer.
_LAST_CHARACTERS = 65_536
_ANSWER = "#/definitions/answer"
_PLAIN_NAME = re.compile("[A-Za-z0-9_-]+")
# Keywords whose values are data, and those whose values are schemas by names, which are data as well.
_DATA = frozenset({"const", "default", "enum", "examples"})
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. parameters: JSON schema of its arguments; None: it has none. strict: refuse a
    schema that cannot be fully enforced. shown: the parameters as prompts show them; None: as they are.
    """

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    shown: Any = None


class ToolKind(Enum):
    """The kinds of tools in OpenAI's interface. The model calls all of them as functions."""

    FUNCTION = "function"
    FREE_FORM = "custom"
    LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client knows it. The model knows it by another name if it has a namespace."""

    name: str
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The tools that an answer may or must call. only: names of the tools that may be called; None: all of them."""

    required: bool = False
    only: Sequence[str] | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call; required: it must call one. parallel: it may call several times.

    declared: all tools of the request, which the prompt shows, so that a choice does not change it; None: `tools`.
    client_tools: tools that are not plain functions to the client, by the names that the model knows. formats: the
    grammars of free texts, each as a line.
    """

    tools: Sequence[ToolSpec] = ()
    required: bool = False
    parallel: bool = True
    declared: Sequence[ToolSpec] | None = field(default=None, compare=False)
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict, compare=False)
    formats: Sequence[str] = field(default=(), compare=False)

    @property
    def shown(self) -> Sequence[ToolSpec]:
        """The tools that the prompt shows."""
        return self.tools if self.declared is None else self.declared

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]


def chosen_tools(
    tools: Sequence[ToolSpec],
    choice: Choice | None,
    client_tools: Mapping[str, ClientTool] = MappingProxyType({}),
    formats: Sequence[str] = (),
) -> ToolUse:
    """Returns the tools that this answer may call, and whether it must call one. choice: None: it may call none.
    client_tools, formats: as in `ToolUse`.

    Raises InvalidTool for a choice that names no tool, or tools that cannot be distinguished.
    """
    if choice is None or not (tools or choice.required or choice.only):
        return ToolUse((), False, True, tools, client_tools, formats)
    declared = tools
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidTool.at("tools", "has two tools of the same name")
    if choice.only is not None:
        tools = _named(tools, choice.only)
    if not tools:
        raise InvalidTool.at("tool_choice", "is `required`, but there are no `tools`")
    return ToolUse(tools, choice.required, choice.parallel, declared, client_tools, formats)


def _named(tools: Sequence[ToolSpec], names: Sequence[str]) -> Sequence[ToolSpec]:
    wanted = set(names)
    found = [tool for tool in tools if tool.name in wanted]
    if unknown := wanted - {tool.name for tool in found}:
        first = next(name for name in names if name in unknown)
        raise InvalidTool.at("tool_choice", f"names {first[:100]!r}, which is not one of the `tools`")
    return found


class AnswerForm:
    """The form in which the served model thinks, calls tools and answers.

    shown: special tokens that the form is made of, by id: a reader of answers has to see them.
    """

    def __init__(
        self,
        calls: ToolFormat,
        thoughts: ReasoningTags | None,
        special_tokens: Mapping[int, str],
        added_tokens: Mapping[int, str] = MappingProxyType({}),
        template: ResponseTemplate | None = None,
        *,
        calls_as_text: bool = True,
    ) -> None:
        """added_tokens: the tokenizer's added tokens, special or not. calls_as_text: an answer that is only the JSON of
        a call counts as a call, in any form of calls.

        template: parses answers without a grammar; None: all answers have a grammar if there are tools.
        """
        self._template = template
        self._calls = calls
        self._calls_as_text = calls_as_text
        self._thoughts = thoughts
        marks = {token: name for token, name in added_tokens.items() if name.strip() and name in calls.markers}
        self._frames = FrameWriter(special_tokens, marks)
        markers = calls.markers + (thoughts.begin + thoughts.end + thoughts.opening if thoughts is not None else "")
        markers += "" if template is None else template.marks
        self.shown = frozenset(token for token, name in special_tokens.items() if name and name in markers)

    @property
    def tool_prompt(self) -> str:
        """The words that tell the model how to call a tool, where its template does not."""
        return TGI_TOOL_PROMPT if self._calls is TGI_FORMAT and self._template is None else ""

    def thoughts(self, answer: Grammar | None) -> ReasoningTags | None:
        """Returns the tags of reasoning before such an answer; None: it has no reasoning.

        answer: the grammar that a request asks for. Only JSON can follow reasoning.
        """
        return self._thoughts if answer is None or answer.type is GrammarKind.JSON_SCHEMA else None

    def grammar(self, use: ToolUse, answer: Grammar | None, *, thinking: bool) -> Grammar | None:
        """Returns the grammar of an answer that may think first, call tools, or have a form of its own.

        answer: the grammar of an answer that calls no tool; None: any text. thinking: thoughts have begun in the
        prompt. Raises InvalidTool.
        """
        thoughts = self.thoughts(answer)
        if (template := self._templated(use, answer)) is not None:
            return None if use.parallel or not use.tools else self._one_call(template, thinking=thinking)
        if not use.tools and (answer is None or thoughts is None):
            return answer
        if answer is not None and answer.type is not GrammarKind.JSON_SCHEMA:
            raise InvalidTool("with `tools`, the format of an answer can only be JSON", param="tools")
        arguments = self._arguments(use)
        as_text = self._may_call_as_text(use, answer)
        document, lenient = _document(use, answer, arguments, as_text=as_text)
        calls = Calls(self._calls, arguments, use.required, use.parallel, as_text) if use.tools else None
        frame = self._frames.frame(calls, None if answer is None else _ANSWER, thoughts, open_=thinking)
        text = json.dumps(document, ensure_ascii=False)
        by_letter = all(tool.strict for tool in use.tools) and (answer is None or answer.reading == JSON_SCHEMA)
        reading = JSON_SCHEMA if by_letter else CLOSED_OBJECTS
        place = "tools" if answer is None else answer.place
        return Grammar(GrammarKind.JSON_SCHEMA, text, "", frame, lenient, reading, place)

    def enforces(self, use: ToolUse, answer: Grammar | None) -> bool:
        """Returns True if the arguments of calls in such an answer have a grammar."""
        return self._templated(use, answer) is None

    def without_calls(self, use: ToolUse, *, thinking: bool) -> Grammar | None:
        """Returns the grammar of a text that calls none of the tools that the prompt shows; None: it shows none."""
        if not use.shown or self._template is not None:
            return None
        arguments = self._arguments(ToolUse(use.shown))
        frame = self._frames.without_calls(self._calls, arguments, self._thoughts, open_=thinking)
        return Grammar(GrammarKind.JSON_SCHEMA, "{}", frame=frame)

    def readers(
        self, use: ToolUse, answer: Grammar | None, *, thinking: bool, prompt: str = ""
    ) -> Callable[[], AnswerReader] | None:
        """Returns a function that creates readers of such answers; None if all of an answer is text."""
        if (template := self._templated(use, answer)) is not None:
            schemas = {tool.name: tool.parameters for tool in use.tools}
            begun = template.begun(prompt[-_LAST_CHARACTERS:])
            return lambda: AnswerReader(TemplatedReader(template, schemas, begun, parallel=use.parallel))
        thoughts = self.thoughts(answer)
        if not use.tools and thoughts is None:
            return None
        as_text = self._may_call_as_text(use, answer)
        if not use.tools:
            return lambda: AnswerReader(TextReader(), thoughts, thinking=thinking)
        heads = CallHeads(self._calls, self._arguments(use), as_text=as_text)
        return lambda: AnswerReader(CallReader(heads), thoughts, thinking=thinking)

    def _one_call(self, template: ResponseTemplate, *, thinking: bool) -> Grammar | None:
        """Returns the grammar of an answer with one call at most; None if it cannot be had of the template."""
        frame = (
            self._frames.one_call(template.call_marks, self._thoughts, open_=thinking) if template.call_marks else None
        )
        return None if frame is None else Grammar(GrammarKind.JSON_SCHEMA, "{}", frame=frame)

    def _may_call_as_text(self, use: ToolUse, answer: Grammar | None) -> bool:
        """Returns True if an answer that is nothing but the JSON of calls has them."""
        return self._calls_as_text and answer is None and not use.required

    def _templated(self, use: ToolUse, answer: Grammar | None) -> ResponseTemplate | None:
        """Returns the template that parses an answer without a grammar; required calls are in TGI's form instead."""
        return self._template if answer is None and not use.required else None

    def _arguments(self, use: ToolUse) -> dict[str, Arguments]:
        """Returns the arguments of each tool, in the form in which the model writes them."""
        return {
            tool.name: Arguments(f"#/$defs/{home}", self._tagged(tool))
            for tool, home in zip(use.tools, _homes(use.names), strict=True)
        }

    def _tagged(self, tool: ToolSpec) -> Sequence[TaggedParameter] | None:
        """Returns the parameters whose arguments are written one by one; None where they are one JSON object."""
        tags = self._calls.tags
        found = None if tags is None else tagged_parameters(tool.parameters)
        return found if tags is None or tags.end or found is None else [each.as_json for each in found]


def _document(
    use: ToolUse, answer: Grammar | None, arguments: Mapping[str, Arguments], *, as_text: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the schema that has those of all JSON in an answer, and the places in it below which constraints that
    cannot be enforced are left to the model.

    arguments: the tools' arguments by tool name. as_text: the JSON of calls may be the whole answer. Raises
    InvalidTool.
    """
    homes = _homes(use.names)
    schemas = [_parameters(tool, f"#/$defs/{home}") for tool, home in zip(use.tools, homes, strict=True)]
    document: dict[str, Any] = {"$defs": dict(zip(homes, schemas, strict=True))}
    places = [place for argument in arguments.values() for place in argument.places]
    places += [argument.place for argument in arguments.values() if as_text and argument.place not in places]
    left = [arguments[tool.name] for tool in use.tools if not tool.strict]
    lenient = [place for each in left for place in dict.fromkeys((each.place, *each.places))]
    if answer is not None:
        document["definitions"] = {"answer": _moved(json.loads(answer.value), _ANSWER)}
        places.append(_ANSWER)
        lenient += [_ANSWER] if answer.lenient else []
    if places:
        document["anyOf"] = [{"$ref": place} for place in places]
    return document, tuple(lenient)


def _homes(names: Sequence[str]) -> list[str]:
    """Returns the names of the tools' schemas under `$defs`: the tools' own, if JSON pointers can have them."""
    return [name if _PLAIN_NAME.fullmatch(name) else f"tool.{index}" for index, name in enumerate(names)]


def _parameters(tool: ToolSpec, home: str) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which is an object's."""
    parameters = tool.parameters
    if parameters is None:
        return _NO_ARGUMENTS
    kind = parameters.get("type", "object") if isinstance(parameters, dict) else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidTool(f"the parameters of the tool {tool.name!r} must be a JSON schema of an object", param="tools")
    read = parameters if tool.strict else with_closed_objects(parameters)
    return {**_moved(read, home), "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """Returns `schema` with references to its own document (`#/$defs/...`) led to where that document now is."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _moved_value(keyword, value, root) for keyword, value in schema.items()}


def _moved_value(keyword: str, value: Any, root: str) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _moved(each, root) for name, each in value.items()}
    if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value.removeprefix("#")
    return _moved(value, root)
