"""Adapters as --lora-adapters names them: ID, ID=FOLDER, ID=FILE.gguf, ID=OWNER/NAME; of the hub with @REVISION."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator

from tgi_server.gguf.paths import SUFFIX
from tgi_server.hub_ids import read_hub_id

LONGEST_ID = 256


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter's id, by which requests name it, and the place that it is read from.

    place: a folder or a GGUF file, or an id of the hub. revision: branch, tag or commit on the hub, else None.
    """

    id: str
    place: str
    revision: str | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """Reads TGI's ID[=PLACE][@REVISION]; of a name of the hub the revision may follow a colon as well.

        Raises ValueError.
        """
        adapter_id, given, place = (part.strip() for part in text.partition("="))
        named, revision = (place, None) if given and Path(place).exists() else _split(place if given else adapter_id)
        source = cls(adapter_id if given else named, named, revision)
        check_id(source.id)
        if not source.place or revision == "":
            raise ValueError(
                f"{text!r} is not ID, ID=FOLDER, ID=FILE.gguf or ID=OWNER/NAME, with @REVISION where it is of the hub"
            )
        if revision is not None and source.path is not None:
            raise ValueError(f"{text!r}: a folder has no revision; leave @{revision} out")
        return source

    @property
    def path(self) -> Path | None:
        """The folder or file on this machine; None if the place is an id of the hub."""
        path = Path(self.place).expanduser()
        is_id = self.place.count("/") <= 1 and not path.is_absolute() and not self.place.startswith(".")
        return None if is_id and not path.is_dir() and path.suffix != SUFFIX else path

    def at(self, path: Path) -> Self:
        """Returns the adapter as it lies in a folder, or in a file."""
        return replace(self, place=str(path), revision=None)

    def __str__(self) -> str:
        """Returns the text that `of` reads."""
        return f"{self.id}={self.place}" + (f"@{self.revision}" if self.revision else "")


# The label value of adapters in metrics that are counted together; no adapter has this id.
OTHER_ADAPTERS = "_other"


def check_id(adapter_id: str) -> None:
    """Raises ValueError for an id that logs, metrics and paths cannot have."""
    if adapter_id == OTHER_ADAPTERS:
        raise ValueError(f"{OTHER_ADAPTERS!r} cannot be an adapter's id: metrics count further adapters by that name")
    if (
        not adapter_id
        or len(adapter_id) > LONGEST_ID
        or not adapter_id.isprintable()
        or adapter_id != adapter_id.strip()
    ):
        raise ValueError(f"an adapter's id has 1 to {LONGEST_ID} printable characters, not {adapter_id[:LONGEST_ID]!r}")


def _split(place: str) -> tuple[str, str | None]:
    """Returns a place without its revision, and that."""
    model_id, of_address = read_hub_id(place)
    if model_id != place:
        if ":" in model_id:
            raise ValueError(f"{place}: give the adapter's OWNER/NAME, not its file")
        return model_id, of_address
    separator = "@" if "@" in place else ":"
    named, given, revision = place.rpartition(separator)
    return (named, revision) if given else (place, None)


def _read(value: object) -> object:
    if isinstance(value, str):
        return [AdapterSource.of(part) for part in value.split(",") if part.strip()]
    return value


def _distinct(sources: list[AdapterSource]) -> list[AdapterSource]:
    ids = [source.id for source in sources]
    if twice := [each for each in ids if ids.count(each) > 1]:
        raise ValueError(f"the id {twice[0]!r} is given twice")
    return sources


# Several, separated by commas, on the command line and in the environment.
AdapterSources = Annotated[list[AdapterSource], BeforeValidator(_read), AfterValidator(_distinct)]
