"""Structures of the CPU kernels, whose members are set by name."""

from typing import Any

import torch


def structure(name: str, **members: Any) -> Any:
    """Returns a `torch.classes.oatmill` structure; members that are None keep their defaults.

    Raises RuntimeError for a member that the structure does not have, or that has another type.
    """
    made = getattr(torch.classes.oatmill, name)()
    for member, value in members.items():
        if value is not None:
            setattr(made, member, value)
    return made
