"""A conversation as a prompt, by the model's Jinja template in a sandbox."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from shared.logging import one_line
from tgi_server.router.errors import InvalidRequest, InvalidTemplate, StartupError
from tgi_server.router.schemas.chat import Message, TextChunk, Tool, ToolCall
from tgi_server.router.text.special_tokens import RenderedPrompt, SpecialTokens
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TokenizerConfig
from tgi_server.router.text.tools import DEFAULT_TOOL_PROMPT

# Seconds that the loops of a template may take.
RENDER_SECONDS = 5.0

_DEADLINE = "_deadline"


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
        self._names_tools = {name: "tools" in source for name, source in config.chat_templates.items()}
        try:
            self._templates = {name: environment.from_string(text) for name, text in config.chat_templates.items()}
        except TemplateError as error:
            raise StartupError(f"the model's chat template is not valid Jinja: {error}") from error

    def shows_tools(self) -> bool:
        """Returns True if the template itself tells the model about tools."""
        return self._names_tools.get(self._name(tools=True), False)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Returns the prompt. A last message of the assistant is left open, for the model to go on with.

        Raises InvalidTemplate when there is no template, or it refuses the messages.
        """
        if not self._templates:
            raise InvalidTemplate("this model has no chat template; give one with --tokenizer-config-path")
        if not messages:
            raise InvalidTemplate("`messages` must not be empty")
        last = messages[-1]
        prefix = last["content"] if last["role"] == "assistant" and not last.get("tool_calls") else None
        template = self._templates[self._name(tools=bool(tools))]
        try:
            prompt = template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=prefix is None,
                **{_DEADLINE: monotonic() + RENDER_SECONDS},
                **self._tokens,
            )
        except TemplateError as error:
            raise InvalidTemplate(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template may trip over anything that a client sends
            raise InvalidTemplate(f"the chat template cannot show these messages: {error}") from error
        return prompt if prefix is None else _leave_open(prompt, prefix)

    def _name(self, *, tools: bool) -> str:
        if (tools and TOOL_TEMPLATE in self._templates) or DEFAULT_TEMPLATE not in self._templates:
            return TOOL_TEMPLATE if TOOL_TEMPLATE in self._templates else next(iter(self._templates), DEFAULT_TEMPLATE)
        return DEFAULT_TEMPLATE


def _leave_open(prompt: str, prefix: str) -> str:
    """Cuts off what the template puts behind the last message."""
    # Backwards, because `rfind` takes quadratic time for texts that repeat themselves.
    behind = prompt[::-1].find(prefix.strip()[::-1])
    return prompt if behind < 0 else prompt[: len(prompt) - behind]


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Returns JSON as `transformers` writes it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    tool_prompt: str | None,
    special_tokens: SpecialTokens | None = None,
) -> RenderedPrompt:
    """Returns the prompt. A template that knows nothing of tools has them told at the end of the last message.

    special_tokens: that only the template may write; None: messages may, too.

    Raises InvalidTemplate, or InvalidRequest for what the model cannot read.
    """
    shown = [_message(message) for message in messages]
    described = [_tool(tool) for tool in tools]
    if shown and described:
        native = template.shows_tools()
        told = [] if native else [json.dumps(described, ensure_ascii=False)]
        prompt = tool_prompt or ("" if native else DEFAULT_TOOL_PROMPT)
        if prompt:
            shown[-1]["content"] += "\n".join(["\n---", *told, prompt])
    conversation = shown, described or None
    if special_tokens is None:
        return RenderedPrompt(template.render(*conversation))
    return special_tokens.render(template.render, conversation)


def _message(message: Message) -> dict[str, Any]:
    """Returns the message as templates expect it: without absent members, content as text, arguments as objects."""
    shown: dict[str, Any] = {"role": message.role, "content": message_text(message)}
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
        if not isinstance(chunk.root, TextChunk):
            raise InvalidRequest("images are not supported: this model reads text only")
        texts.append(chunk.root.text)
    return "".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)  # which bounds how deep it may nest, and takes no lone surrogates
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call `{one_line(call.id, 100)}` are not JSON: {error}"
            ) from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments or {}}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.arguments or {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}
