"""Generates the templates of the Helm chart from the manifests in deploy/kubernetes.

A comment `# helm: TEXT` there is for the chart: its template has TEXT in place of the value before it, or of the line.
`python -m tools.helm` writes the templates; `python -m tools.helm --check` exits 1 when the committed ones are stale.
"""

import argparse
import re
import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
TEMPLATES = DEPLOY / "helm" / "oatmill" / "templates"
_VALUE = re.compile(r"(?m)^( *[^\s:]+: )\S.*  # helm: (.*)$")
_LINE = re.compile(r"(?m)^( *)# helm: (.*)$")


def templates() -> dict[Path, str]:
    """Returns the text of each template, by its file."""
    manifests = DEPLOY / "kubernetes"
    files = [*(manifests / "gpu").glob("*.yaml"), manifests / "service-monitors.yaml"]
    texts = {TEMPLATES / file.name: file.read_text() for file in files if file.name != "kustomization.yaml"}
    return {file: _LINE.sub(r"\1\2", _VALUE.sub(r"\1\2", text)) for file, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with what is committed")
    check = parser.parse_args().check
    made = templates()
    committed = {file: file.read_text() for file in TEMPLATES.glob("*.yaml")}
    if check and made != committed:
        names = sorted(file.name for file in {*made, *committed} if made.get(file) != committed.get(file))
        sys.exit(f"stale templates: {', '.join(names)}; run `make reference` and commit the result")
    if not check:
        for file, text in made.items():
            file.write_text(text)


if __name__ == "__main__":
    main()
