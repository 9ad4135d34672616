"""Tools and what they are for."""

from dataclasses import dataclass

from tools.demo_model.facts import rows


@dataclass(frozen=True)
class Tool:
    """One tool: its `use` after "for", its `caution` as an order, and the `swap` that may do the same job."""

    name: str
    use: str
    caution: str
    swap: str


TOOLS = tuple(Tool(**row) for row in rows("tools"))
BY_NAME = {tool.name: tool for tool in TOOLS}
