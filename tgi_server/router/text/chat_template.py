"""The model's Jinja template for conversations, in a sandbox."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from tgi_server.router.errors import InvalidTemplate, StartupError
from tgi_server.router.text.template_allowance import Allowance, render_deadline, rendering
from tgi_server.router.text.template_bounds import BoundedEnvironment
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TOKEN_NAMES, TOOL_TEMPLATE, TokenizerConfig

NO_TEMPLATE = "this model has no chat template; give one with --tokenizer-config-path"

# Variables that `chat_template_kwargs` may not replace.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        *TOKEN_NAMES,
    }
)
# Marks the end of a message that the model continues, while the template is rendered: a private-use character. The
# message's text itself would not do: what the template writes after it may contain the same text.
_OPEN_END = "\ue000"
# The content of a message: a text, or a list of parts.
ShownContent = str | list[dict[str, Any]]

# Probes, conversations that show what a template reads: a probe succeeds if the prompt has this text.
_SOUGHT = "haystack-needle"
_PROBE_CHARACTERS = 2**22
_LONGEST_DATE = 256
# The roles of instructions. `developer` is OpenAI's newer name for `system`.
INSTRUCTING = ("system", "developer")


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_PROBES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "user": [{"role": "user", "content": _SOUGHT}],
    "system": [{"role": "system", "content": _SOUGHT}, {"role": "user", "content": "a"}],
    "assistant": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": _SOUGHT},
        {"role": "user", "content": "a"},
    ],
    "tool": [
        {"role": "user", "content": "a"},
        _calling({}),
        {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": _SOUGHT},
    ],
}


# Probes with instructions after the first message. The empty role is replaced by the role to be tested.
_LATER_INSTRUCTIONS: Sequence[Sequence[tuple[str, str]]] = (
    (("system", "a"), ("", _SOUGHT), ("user", "a")),
    (("system", "a"), ("user", "a"), ("", _SOUGHT)),
    (("user", "a"), ("assistant", "a"), ("", _SOUGHT), ("user", "a")),
)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks generated text for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options for the end of a prompt.

    add_generation_prompt: True if the template writes the beginning of the answer. continue_last: True if the model
    continues the last message; None: if that is the assistant's, and calls no tool.
    """

    add_generation_prompt: bool = True
    continue_last: bool | None = None

    def prefix(self, last: Mapping[str, Any]) -> str | None:
        """Returns the text of the last message if the model has to continue it; None if not, or if it is blank."""
        own = last["role"] == "assistant" and not last.get("tool_calls")
        wanted = own if self.continue_last is None else self.continue_last
        content = content_text(last["content"])
        return content if wanted and content.strip() else None

    def opens_turn(self, last: Mapping[str, Any]) -> bool:
        """Returns True if the last message is an empty message of the assistant, a placeholder for the answer."""
        said = content_text(last["content"]).strip() or last.get("tool_calls") or last.get("reasoning_content")
        return last["role"] == "assistant" and not said and self.continue_last is not False


_USUAL = RenderOptions()
_NONE: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """Renders conversations. A model without a template is served, but its chat routes refuse every request."""

    def __init__(self, config: TokenizerConfig) -> None:
        """Raises StartupError for a template that is not valid Jinja."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.bound()
        self._tokens = {"bos_token": "", "eos_token": "", **config.tokens}
        self._sources = dict(config.chat_templates)
        self._templates = {name: _compiled(environment, text) for name, text in config.chat_templates.items()}
        self._probes_until = render_deadline()  # for all probes together
        self._in_parts = {name: self._roles_in_parts(template) for name, template in self._templates.items()}
        self._arguments_as_text = {
            name for name, template in self._templates.items() if self._takes_json(template, self._in_parts[name])
        }
        self._tools_of_system = {
            name
            for name, template in self._templates.items()
            if "tools" in self._sources[name] and self._takes_tools_of_system(template)
        }

        self._later_instructions = {
            name: frozenset(role for role in INSTRUCTING if self._shows_later(template, role, self._in_parts[name]))
            for name, template in self._templates.items()
        }

    def shows_tools(self) -> bool:
        """Returns True if the template itself tells the model about tools."""
        return "tools" in self.source

    def reads_tools_of_system(self) -> bool:
        """Returns True if the template reads tools only as JSON in the member `tools` of the system message."""
        return self._name(tools=True) in self._tools_of_system

    @property
    def source(self) -> str:
        """The source of the template for conversations with tools; empty if there is none."""
        return self._sources.get(self._name(tools=True), "")

    def knows_role(self, role: str, *, tools: bool) -> bool:
        """Returns True if the template names the role."""
        return role in self._sources.get(self._name(tools=tools), "")

    def reads_later_instructions(self, role: str, *, tools: bool) -> bool:
        """Returns True if the template shows messages of that role (one of `INSTRUCTING`) at any position."""
        return role in self._later_instructions.get(self._name(tools=tools), frozenset())

    def reads_parts(self, role: str, *, tools: bool) -> bool:
        """Returns True if the template reads content of that role only as a list of parts, and not as a text."""
        roles = self._in_parts.get(self._name(tools=tools), frozenset())
        return _probed(role) in roles

    def reads_json(self, *, tools: bool) -> bool:
        """Returns True if the template reads the arguments of earlier calls only as text, and fails with an object."""
        return self._name(tools=tools) in self._arguments_as_text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] = _NONE,
        options: RenderOptions = _USUAL,
    ) -> str:
        """Returns the prompt. By default the model continues a trailing assistant message.

        variables: further variables of the template.

        Raises InvalidTemplate if there is no template, or it refuses the messages.
        """
        if not self._templates:
            raise InvalidTemplate(NO_TEMPLATE)
        if not messages:
            raise InvalidTemplate.at("messages", "must not be empty")
        prefix = options.prefix(messages[-1])
        if prefix is not None:
            text = prefix.rstrip() + _OPEN_END
            content = messages[-1]["content"]
            images = [] if isinstance(content, str) else [part for part in content if part["type"] == "image"]
            begun = text if isinstance(content, str) else images + as_parts(text)
            messages = [*messages[:-1], {**messages[-1], "content": begun}]
        template = self._templates[self._name(tools=bool(tools))]
        try:
            with rendering(Allowance()):
                prompt = template.render(
                    **variables,
                    messages=messages,
                    tools=tools or None,
                    add_generation_prompt=prefix is None and options.add_generation_prompt,
                    **self._tokens,
                )
            prompt.encode()  # tokenizers do not accept lone surrogates
        except TemplateError as error:
            raise InvalidTemplate(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template may fail in any way with a client's data
            raise InvalidTemplate(f"the chat template cannot render these messages: {error}") from error
        return prompt if prefix is None else _leave_open(prompt)

    def image_text(self, placeholder: str) -> str:
        """Returns what the template writes for an image, including `placeholder`."""
        if not self._templates:
            return placeholder
        template, text = self._templates[self._name(tools=False)], as_parts(_SOUGHT)
        self._probes_until = render_deadline()
        one, none = (self._try(template, [{"role": "user", "content": each}]) for each in (as_parts(None) + text, text))
        start = next((place for place, pair in enumerate(zip(one, none, strict=False)) if pair[0] != pair[1]), 0)
        shown = one[start : start + len(one) - len(none)].strip()
        return shown if shown.count(placeholder) == 1 else placeholder

    def _roles_in_parts(self, template: Template) -> frozenset[str]:
        """Returns the roles whose content the template reads only as a list of parts."""
        found: set[str] = set()
        for role, probe in _PROBES.items():
            others = [_in_parts(each) if each["role"] in found else each for each in probe]
            parts = [_in_parts(each) if each["role"] == role else each for each in others]
            if _SOUGHT not in self._try(template, others) and _SOUGHT in self._try(template, parts):
                found.add(role)
        return frozenset(found)

    def _takes_json(self, template: Template, in_parts: Collection[str]) -> bool:
        """Returns True if the template shows the arguments of calls only as JSON, and not as an object.

        in_parts: roles whose content it reads as a list of parts.
        """
        arguments = {_SOUGHT: _SOUGHT}
        shown = []
        for form in (arguments, json.dumps(arguments)):
            messages = [{"role": "user", "content": "a"}, _calling(form)]
            shown.append(self._try(template, [_in_parts(m) if m["role"] in in_parts else m for m in messages]))
        as_python = str(arguments) in shown[0]
        return (_SOUGHT not in shown[0] or as_python) and _SOUGHT in shown[1]

    def _shows_later(self, template: Template, role: str, in_parts: Collection[str]) -> bool:
        """Returns True if the template shows messages of that role after others. in_parts: as in `_takes_json`."""
        probes = [[{"role": of or role, "content": text} for of, text in probe] for probe in _LATER_INSTRUCTIONS]
        shown = [[_in_parts(m) if _probed(m["role"]) in in_parts else m for m in probe] for probe in probes]
        return all(_SOUGHT in self._try(template, probe) for probe in shown)

    def _takes_tools_of_system(self, template: Template) -> bool:
        """Returns True if the template shows tools in the system message, but not tools in its variable."""
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}]
        tool = {"type": "function", "function": {"name": _SOUGHT, "description": "a", "parameters": {"type": "object"}}}
        inside = [{**messages[0], "tools": json.dumps([tool])}, messages[1]]
        return _SOUGHT in self._try(template, inside) and _SOUGHT not in self._try(template, messages, [tool])

    def _try(self, template: Template, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Returns the prompt of a probe; empty if the template raises an error."""
        usual = {"tools": tools, "add_generation_prompt": True}
        try:
            with rendering(Allowance(_PROBE_CHARACTERS, self._probes_until)):
                return template.render(messages=messages, **usual, **self._tokens)
        except Exception:  # a template may raise anything
            return ""

    def _name(self, *, tools: bool) -> str:
        if (tools and TOOL_TEMPLATE in self._templates) or DEFAULT_TEMPLATE not in self._templates:
            return TOOL_TEMPLATE if TOOL_TEMPLATE in self._templates else next(iter(self._templates), DEFAULT_TEMPLATE)
        return DEFAULT_TEMPLATE


def _compiled(environment: BoundedEnvironment, source: str) -> Template:
    """Compiles a template. Raises StartupError if it is not valid Jinja, or nested too deep."""
    try:
        return environment.from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise StartupError(f"the model's chat template nests too deep ({message}); use a simpler one") from None
    except Exception as error:  # the compiler may fail in any way
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        message = " ".join(str(error.message if isinstance(error, TemplateError) else error).split())
        raise StartupError(f"the model's chat template is not valid Jinja{line}: {message}") from None


def _probed(role: str) -> str:
    """Returns the role whose probe stands for this role."""
    return role if role in _PROBES else "user"


def _leave_open(prompt: str) -> str:
    """Cuts off the mark at the end of the last message, and what the template writes after it."""
    for mark in (_OPEN_END, json.dumps(_OPEN_END)[1:-1]):  # a template may write ASCII only
        before, end, _ = prompt.rpartition(mark)
        if end:
            return before
    return prompt


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as `transformers` writes it: without escapes for HTML and, by default, for non-ASCII characters.

    Order and names of the parameters are those of the filter in `transformers`; templates use both.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _LONGEST_DATE:
        raise TemplateError(
            f"the template's date format has {len(form)} characters; at most {_LONGEST_DATE} are allowed"
        )
    return datetime.now().strftime(form)


def content_text(content: ShownContent) -> str:
    """Returns the text of a message's content."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_parts(*texts: str | None) -> list[dict[str, Any]]:
    """Returns content as a list of parts; None stands for an image. Never empty, as some templates read the first."""
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts or ("",)]


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": as_parts(message["content"])}
