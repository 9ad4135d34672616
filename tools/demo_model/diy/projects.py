"""Projects in and around the house: what each needs, how it is done and how long it takes."""

from dataclasses import dataclass

from tools.demo_model.facts import rows


@dataclass(frozen=True)
class Project:
    """One job. `title` is what one does, such as `hang a shelf`; `steps` are whole sentences in order."""

    title: str
    place: str
    level: str
    minutes: int
    tools: tuple[str, ...]
    materials: tuple[str, ...]
    steps: tuple[str, ...]
    caution: str


def _project(row: dict[str, str]) -> Project:
    return Project(
        title=row["title"],
        place=row["place"],
        level=row["level"],
        minutes=int(row["minutes"]),
        tools=tuple(row["tools"].split(",")),
        materials=tuple(row["materials"].split(",")),
        steps=tuple(row["steps"].split(";")),
        caution=row["caution"],
    )


PROJECTS = tuple(_project(row) for row in rows("projects"))
