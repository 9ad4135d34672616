"""Converts the tools of /v1/responses to functions for the model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tgi_server.router.answers.free_form import (
    LOCAL_SHELL,
    free_form_tool,
    local_shell_tool,
    name_for_model,
)
from tgi_server.router.answers.tools import Choice, ClientTool, ToolKind, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.schemas.response_tools import (
    AllowedTool,
    ChosenLocalShell,
    ChosenNamespace,
    ChosenTool,
    FunctionTool,
    LocalShellTool,
    NamespacedTool,
    NamespaceTool,
    ResponsesAllowedTools,
    ResponsesFreeFormTool,
    ResponseTool,
)
from tgi_server.router.schemas.responses import ResponsesRequest


@dataclass(slots=True)
class OfferedTools:
    """The tools of a request.

    specs: all tools, as functions for the model. client_tools: tools that are not plain functions, by the names that
    the model sees. formats: one line for each grammar of a tool's text, for a note if it is not enforced.
    """

    specs: list[ToolSpec] = field(default_factory=list)
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    formats: list[str] = field(default_factory=list)

    def add(self, tools: Iterable[ResponseTool | NamespacedTool], place: str, namespace: str | None = None) -> None:
        """Adds tools. place: the field of their list in the request."""
        for index, tool in enumerate(tools):
            match tool.root:
                case FunctionTool() as function:
                    name = name_for_model(function.name, namespace)
                    self.specs.append(ToolSpec(name, function.description, function.parameters, function.strict))
                    if namespace is not None:
                        self.client_tools[name] = ClientTool(function.name, namespace=namespace)
                case ResponsesFreeFormTool() as custom:
                    self._add_free_form(custom, f"{place}[{index}]", namespace)
                case LocalShellTool():
                    self.specs.append(local_shell_tool())
                    self.client_tools[LOCAL_SHELL] = ClientTool(LOCAL_SHELL, ToolKind.LOCAL_SHELL)
                case NamespaceTool() as inner:
                    self.add(inner.tools, f"{place}[{index}].tools", inner.name)

    def _add_free_form(self, tool: ResponsesFreeFormTool, place: str, namespace: str | None) -> None:
        name = name_for_model(tool.name, namespace)
        form = tool.format
        grammar = (form.syntax, form.definition) if form is not None and form.syntax is not None else ()
        self.specs.append(free_form_tool(name, tool.description, *grammar))
        self.client_tools[name] = ClientTool(tool.name, ToolKind.FREE_FORM, namespace)
        if grammar:
            self.formats.append(f"{place}.format ({grammar[0]})")

    def use(self, request: ResponsesRequest) -> ToolUse:
        """Returns the tools that the answer may call. Raises InvalidTool."""
        return chosen_tools(self.specs, self._choice(request), self.client_tools, self.formats)

    def _choice(self, request: ResponsesRequest) -> Choice | None:
        """Returns the choice of tools; None: no tool may be called."""
        chosen = request.tool_choice or "auto"
        if isinstance(chosen, str):
            required = chosen == "required"
            return None if chosen == "none" else Choice(required, parallel=request.parallel_tool_calls)
        match chosen.root:
            case ResponsesAllowedTools(mode=mode, tools=tools):
                names = list(self._names(tool.root if isinstance(tool, AllowedTool) else tool for tool in tools))
                return Choice(mode == "required", names, request.parallel_tool_calls) if names else None
            case one:
                return Choice(required=True, only=list(self._names([one])), parallel=False)

    def _names(self, chosen: Iterable[object]) -> Iterator[str]:
        """Yields the names that the model uses for chosen tools."""
        for each in chosen:
            match each:
                case ChosenTool(name=name, namespace=namespace):
                    yield self._name(name, namespace)
                case ChosenLocalShell():
                    yield LOCAL_SHELL
                case ChosenNamespace(name=namespace):
                    yield from (name for name, tool in self.client_tools.items() if tool.namespace == namespace)

    def _name(self, name: str, namespace: str | None) -> str:
        if namespace is not None or any(spec.name == name for spec in self.specs):
            return name_for_model(name, namespace)
        found: Sequence[str] = [known for known, tool in self.client_tools.items() if tool.name == name]
        return found[0] if len(found) == 1 else name
