"""Generates the Python stubs of `proto/*.proto` into `shared/stubs/`.

`python -m tools.stubs` writes them; `python -m tools.stubs --check` exits 1 when the committed ones are stale.
"""

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = ("generate", "llm")
INIT = '"""Compiled from `proto/` by `make proto`. Do not edit."""\n'


def generate(target: Path) -> None:
    """Writes the stubs of every contract under `target`/shared/stubs.

    The proto folder is mapped to the virtual folder `shared/stubs`, so that the generated modules import each
    other by the names that they have in this repository.
    """
    for contract in CONTRACTS:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path=shared/stubs={ROOT / 'proto'}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                f"--python_out={target}",
                f"--pyi_out={target}",
                f"--grpc_python_out={target}",
                f"shared/stubs/{contract}.proto",
            ]
        )
        if status != 0:
            sys.exit(f"protoc failed on proto/{contract}.proto")
    folder = target / "shared/stubs"
    (folder / "__init__.py").write_text(INIT)


def stale(committed: Path, fresh: Path) -> list[str]:
    """Returns the names of the stubs that differ between the two folders, or are in only one of them."""
    names = {path.name for folder in (committed, fresh) for path in folder.glob("*.py*") if path.is_file()}
    _, mismatch, errors = filecmp.cmpfiles(committed, fresh, sorted(names), shallow=False)
    return sorted(mismatch + errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with what is committed")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        if names := stale(ROOT / "shared/stubs", Path(scratch) / "shared/stubs"):
            sys.exit(f"stale stubs: {', '.join(names)}; run `make proto` and commit the result")


if __name__ == "__main__":
    main()
