"""A conversation as a prompt, by the model's Jinja template in a sandbox."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from shared.logging import one_line
from tgi_server.router.errors import InvalidRequest, InvalidTemplate, StartupError
from tgi_server.router.schemas.chat import ChatRequest, ImageChunk, Message, TextChunk, Tool, ToolCall
from tgi_server.router.text.special_tokens import RenderedPrompt, SpecialTokens
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TokenizerConfig

# Seconds that the loops of a template may take.
RENDER_SECONDS = 5.0

_DEADLINE = "_deadline"
# Variables that `chat_template_kwargs` may not replace.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        _DEADLINE,
    }
)
_DEVELOPER = "developer"
# The end of a message that is gone on with, while it is rendered: a private character, which no template writes itself.
# The text of the message may well be a part of what a template puts behind it.
_OPEN_END = "\ue000"
# By these, templates let a model think before it answers.
THINKING_SWITCHES = ("enable_thinking", "thinking")


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks for training what a model wrote. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """A Jinja sandbox whose loops end in time, because clients decide what is looped over."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "in_time", [], [], None, None, lineno=loop.lineno)
        return tree


@pass_context
def _in_time(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a loop. Raises TemplateError once the time for rendering is over."""
    deadline = context[_DEADLINE]
    for item in items:
        if monotonic() > deadline:
            raise TemplateError(f"rendering takes more than {RENDER_SECONDS} s; send fewer or shorter messages")
        yield item


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The end of a prompt.

    add_generation_prompt: the template begins the answer. continue_last: the last message is gone on with; None: if it
    is the assistant's, and calls no tool.
    """

    add_generation_prompt: bool = True
    continue_last: bool | None = None

    def prefix(self, last: Mapping[str, Any]) -> str | None:
        """Returns the beginning of the answer, if the last message is one: a blank text begins nothing."""
        own = last["role"] == "assistant" and not last.get("tool_calls")
        wanted = own if self.continue_last is None else self.continue_last
        content: str = last["content"]
        return content if wanted and content.strip() else None

    def opens_turn(self, last: Mapping[str, Any]) -> bool:
        """Returns True if the last message stands in the place of an answer of which there is nothing yet."""
        said = last["content"].strip() or last.get("tool_calls") or last.get("reasoning_content")
        return last["role"] == "assistant" and not said and self.continue_last is not False


_USUAL = RenderOptions()
_NONE: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """Renders conversations. A model without a template is served, but its chat routes refuse every request."""

    def __init__(self, config: TokenizerConfig) -> None:
        """Raises StartupError for a template that is not Jinja."""
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["in_time"] = _in_time
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._tokens = {"bos_token": config.bos_token or "", "eos_token": config.eos_token or ""}
        self._sources = dict(config.chat_templates)
        try:
            self._templates = {name: environment.from_string(text) for name, text in config.chat_templates.items()}
        except TemplateError as error:
            raise StartupError(f"the model's chat template is not valid Jinja: {error}") from error

    def shows_tools(self) -> bool:
        """Returns True if the template itself tells the model about tools."""
        return "tools" in self.source

    @property
    def source(self) -> str:
        """The source of the template for conversations with tools; empty without one."""
        return self._sources.get(self._name(tools=True), "")

    def knows_role(self, role: str, *, tools: bool) -> bool:
        """Returns True if the template names the role."""
        return role in self._sources.get(self._name(tools=tools), "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] = _NONE,
        options: RenderOptions = _USUAL,
    ) -> str:
        """Returns the prompt. A last message of the assistant is left open, for the model to go on with.

        variables: of the template, beside its usual ones.

        Raises InvalidTemplate when there is no template, or it refuses the messages.
        """
        if not self._templates:
            raise InvalidTemplate("this model has no chat template; give one with --tokenizer-config-path")
        if not messages:
            raise InvalidTemplate("`messages` must not be empty")
        prefix = options.prefix(messages[-1])
        if prefix is not None:
            messages = [*messages[:-1], {**messages[-1], "content": prefix.rstrip() + _OPEN_END}]
        template = self._templates[self._name(tools=bool(tools))]
        try:
            prompt = template.render(
                **variables,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=prefix is None and options.add_generation_prompt,
                **{_DEADLINE: monotonic() + RENDER_SECONDS},
                **self._tokens,
            )
        except TemplateError as error:
            raise InvalidTemplate(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template may trip over anything that a client sends
            raise InvalidTemplate(f"the chat template cannot show these messages: {error}") from error
        return prompt if prefix is None else _leave_open(prompt)

    def _name(self, *, tools: bool) -> str:
        if (tools and TOOL_TEMPLATE in self._templates) or DEFAULT_TEMPLATE not in self._templates:
            return TOOL_TEMPLATE if TOOL_TEMPLATE in self._templates else next(iter(self._templates), DEFAULT_TEMPLATE)
        return DEFAULT_TEMPLATE


def _leave_open(prompt: str) -> str:
    """Cuts off what the template puts behind the last message."""
    before, end, _ = prompt.rpartition(_OPEN_END)
    return before if end else prompt


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Returns JSON as `transformers` writes it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def render_conversation(
    template: ChatTemplate,
    request: ChatRequest,
    tools: Sequence[Tool],
    special_tokens: SpecialTokens | None = None,
    tool_prompt: str = "",
) -> RenderedPrompt:
    """Returns the prompt. A template that knows nothing of tools has them told at the end of the last message.

    special_tokens: that only the template may write; None: messages may, too. tool_prompt: what tells the model how to
    call a tool, unless the request has one.

    Raises InvalidTemplate, or InvalidRequest for what the model cannot read.
    """
    developer = _DEVELOPER if template.knows_role(_DEVELOPER, tools=bool(tools)) else "system"
    shown = [_message(message, developer) for message in request.messages]
    options = RenderOptions(request.add_generation_prompt, request.continue_final_message)
    if shown and options.opens_turn(shown[-1]):
        # Shown as it is, it would be a turn that has ended, behind which a model has nothing to say.
        shown, options = shown[:-1], RenderOptions(continue_last=False)
    described = [_tool(tool) for tool in tools]
    if shown and described:
        told = [] if template.shows_tools() else [json.dumps(described, ensure_ascii=False)]
        prompt = request.tool_prompt or tool_prompt
        if told or prompt:
            shown[-1]["content"] += "\n".join(["\n---", *told, prompt])
    conversation = shown, described or None, _variables(request)
    render = partial(template.render, options=options)
    if special_tokens is None:
        return RenderedPrompt(render(*conversation))
    return special_tokens.render(render, conversation)


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Returns what the request tells the template. Raises InvalidRequest for variables that are the template's own."""
    variables: dict[str, Any] = {}
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            variables |= dict.fromkeys(THINKING_SWITCHES, False)
    chosen = request.chat_template_kwargs or {}
    if taken := sorted(_RESERVED & chosen.keys()):
        raise InvalidRequest(f"`chat_template_kwargs` may not set {taken[0]!r}, which the server sets itself")
    return variables | chosen


def _message(message: Message, developer: str) -> dict[str, Any]:
    """Returns the message as templates expect it: without absent members, content as text, arguments as objects.

    developer: the role by which the template knows OpenAI's `developer`.
    """
    role = developer if message.role == _DEVELOPER else message.role
    shown: dict[str, Any] = {"role": role, "content": message_text(message)}
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shown["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def message_text(message: Message) -> str:
    """Returns the text of a message. Raises InvalidRequest for what is no text."""
    content = message.content.root if message.content is not None else ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for chunk in content:
        if isinstance(chunk.root, ImageChunk):
            raise InvalidRequest("images are not supported: this model reads text only")
        texts.append(chunk.root.text if isinstance(chunk.root, TextChunk) else chunk.root.refusal)
    return "".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = _read_arguments(arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call `{one_line(call.id, 100)}` are not JSON: {error}"
            ) from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments or {}}}


def _read_arguments(text: str) -> Any:
    """Returns what the arguments of an earlier call say; of a call that was cut off, what it had said until then.

    Raises ValueError for what is no beginning of JSON.
    """
    if not text.strip():  # many clients keep a call without arguments so
        return {}
    try:
        return from_json(text)  # which bounds how deep it may nest, and takes no lone surrogates
    except ValueError as error:
        if "EOF" not in str(error):
            raise
        # The text itself would not do: many templates look for the names and values of an object.
        return from_json(text, allow_partial="trailing-strings")


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.arguments or {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}
