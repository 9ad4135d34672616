"""`make site`: arranges the documents for mkdocs in their own folders, so that links stay right."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "build" / "site"


def main() -> int:
    """Returns 0, or the exit code of mkdocs, which fails for a page that is not in the menu or a broken anchor."""
    shutil.rmtree(STAGE, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.svg", "*.png"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, STAGE / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
