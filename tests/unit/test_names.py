"""One name means one thing: no two classes of the code share a name, unless they are forms of one message."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "llm_functionalities", "shared", "tgi_server", "tools")
# Each is the Python form of the message of this name in its service's contract.
FORMS_OF_ONE_MESSAGE = {"Grammar"}


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.parent.name == "stubs":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in FORMS_OF_ONE_MESSAGE} == {}
