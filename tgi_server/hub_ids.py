"""Ids of the hub, also in the form of addresses that people copy from its pages."""

import re
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

_HOSTS = ("huggingface.co", "hf.co")
_VIEWS = ("tree", "blob", "resolve")
_GGUF = ".gguf"


def read_hub_id(text: str) -> tuple[str, str | None]:
    """Returns the id that an address names, and its branch, tag or commit, unless that is main. Other texts stay.

    The id of a GGUF file is OWNER/NAME:FILE. Raises ValueError for the address of something else than a model.
    """
    place = text.strip().removeprefix("https://").removeprefix("http://").removeprefix("www.")
    host, _, path = place.partition("/")
    if host not in _HOSTS:
        return text, None
    parts = [unquote(part) for part in re.split("[?#]", path)[0].strip("/").split("/")]
    view = next((at for at in (1, 2) if at < len(parts) and parts[at] in _VIEWS), len(parts))
    model_id, (revision, *file) = "/".join(parts[:view]), parts[view + 1 :] or ["main"]
    if parts[0] in ("", "datasets", "spaces") or view > 2 or (file and not file[-1].endswith(_GGUF)):
        raise ValueError(f"{text} is not the address of a model, or of a GGUF file; give OWNER/NAME")
    if file:  # without the number of a part
        model_id += ":" + re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", "/".join(file))
    return model_id, None if revision == "main" else revision


def _of_main(text: str) -> str:
    model_id, revision = read_hub_id(text)
    if revision is not None:
        raise ValueError(f"the address names the revision {revision}; give OWNER/NAME")
    return model_id


# An id of the hub without a revision, or a path.
HubId = Annotated[str, AfterValidator(_of_main)]
