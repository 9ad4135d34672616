"""Counts the outcomes of requests, by their kind."""

from collections import Counter, defaultdict

SHOWN = 20


class Tally:
    """Counts outcomes of each kind of request, and keeps what must not have happened."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[str] = []

    def note(self, kind: str, outcome: str) -> None:
        self.outcomes[kind][outcome] += 1

    def fault(self, kind: str, what: str) -> None:
        self.outcomes[kind]["wrong"] += 1
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{kind}: {what[:500]}")

    def table(self) -> str:
        lines = ["| request | sent | outcomes |", "|---|--:|---|"]
        for kind, outcomes in sorted(self.outcomes.items()):
            shown = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
            lines.append(f"| {kind} | {outcomes.total()} | {shown} |")
        return "\n".join(lines)
