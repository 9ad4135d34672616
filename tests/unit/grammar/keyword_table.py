"""The table of JSON Schema keywords in docs/structured.md: `python -m tests.unit.grammar.keyword_table`."""

from pathlib import Path

from tests.unit.grammar.keyword_cases import ANNOTATIONS, ENFORCED, LEFT, REFUSED

DOCUMENT = Path(__file__).parents[3] / "docs" / "structured.md"
_BEGIN, _END = "<!-- keywords: begin -->\n", "<!-- keywords: end -->\n"


def keyword_table() -> str:
    """Returns the table of keywords, with what the tests show of each."""
    counts = {keyword: sum(len(group["tests"]) for group in groups) for keyword, groups in ENFORCED.items()}
    rows = [f"| `{keyword}` | enforced | {count} |" for keyword, count in counts.items()]
    rows += [f"| `{keyword}` | ignored | 2 |" for keyword in ANNOTATIONS]
    rows += [f"| {name} | left to the model | 1 |" for name in LEFT]
    rows += [f"| {name} | refused by name, or left to the model | 2 |" for name in REFUSED]
    return "\n".join(["| keyword | what happens | cases |", "|---|---|---|", *rows, ""])


def table_in_document() -> str:
    return DOCUMENT.read_text().split(_BEGIN)[1].split(_END)[0]


def write() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(_BEGIN)
    DOCUMENT.write_text(before + _BEGIN + keyword_table() + _END + rest.split(_END)[1])


if __name__ == "__main__":
    write()
