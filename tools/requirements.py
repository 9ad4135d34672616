"""Prints what `pyproject.toml` requires, for the extras named, one requirement a line.

Container images install these before the source is copied, so that a change of the source does not reinstall them.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    for extra in sys.argv[1:]:
        project["dependencies"] += project["optional-dependencies"][extra]
    print("\n".join(project["dependencies"]))


if __name__ == "__main__":
    main()
