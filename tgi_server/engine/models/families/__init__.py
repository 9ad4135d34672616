"""Families of models: a file for each, whose FAMILIES has a row for each `model_type`."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.spec import DecoderSpec, Family, NoSpec
from tgi_server.engine.parallel.plan import ShardingPlan


def family_of(config: Any) -> Family:
    """Returns the family of a model's configuration; an empty one if no family is known."""
    return _families().get(config.model_type, Family())


def position_limit(config: Any) -> int | None:
    """Returns the number of positions that a model has; None: unlimited, since they are relative."""
    config = config.get_text_config(decoder=True)
    return family_of(config).positions(config)


def spec_of(config: Any) -> DecoderSpec:
    """Returns the spec of a model's decoder. Raises NoSpec."""
    config = config.get_text_config(decoder=True)
    spec = family_of(config).spec
    if spec is None:
        raise NoSpec(f"there is no spec for {config.model_type} models")
    return spec(config)


def plan_for(config: Any) -> ShardingPlan:
    """Returns the sharding plan of a configuration. Raises UnsupportedModel for a model that cannot be split."""
    config = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    plan = family_of(config).plan
    if plan is None:
        known = ", ".join(sorted(name for name, family in _families().items() if family.plan is not None))
        raise UnsupportedModel(
            f"{config.model_type} models cannot be split over several shards; leave out --num-shard and --sharded. "
            f"Those that can: {known}"
        )
    return plan(config)


def image_models() -> list[str]:
    """Returns the types of the models whose images are read."""
    return sorted(name for name, family in _families().items() if family.images)


@cache
def _families() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= importlib.import_module(f"{__name__}.{module.name}").FAMILIES
    return found
