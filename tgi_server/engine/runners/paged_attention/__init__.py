"""Paged attention for the model families that do not go through `AttentionInterface`.

A module of such a family gets a subclass of its class that differs in how it attends. It stays the same object with
the same weights under the same names, so nothing that looks at the model from outside notices.
"""

import importlib
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.paged_cache import IMPLEMENTATION
from tgi_server.engine.models.families import family_of


def install_paged_attention(model: PreTrainedModel) -> Callable[[], None]:
    """Makes the model attend through its modules' `paged_cache`. Returns a function that takes that back.

    A model may ignore what is set here: the caller has to find out if it attends in this way, and rightly.
    """
    own = model.config._attn_implementation
    name = family_of(model.config).attention
    if name is None:
        model.set_attn_implementation(IMPLEMENTATION)
        return lambda: model.set_attn_implementation(own)
    family = importlib.import_module(f"{__name__}.{name}")  # SUBSTITUTES: what takes the place of each class
    replaced = [(module, type(module)) for module in model.modules() if type(module) in family.SUBSTITUTES]
    for module, original in replaced:
        _become(module, family.SUBSTITUTES[original])
    model.config._attn_implementation = getattr(family, "IMPLEMENTATION", IMPLEMENTATION)

    def restore() -> None:
        for module, original in replaced:
            module.__class__ = original
        model.config._attn_implementation = own

    return restore


def _become(module: nn.Module, substitute: type[nn.Module]) -> None:
    module.__class__ = substitute
    if prepare := getattr(module, "prepare", None):
        prepare()
