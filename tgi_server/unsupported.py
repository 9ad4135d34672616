"""Settings of TGI that this server knows by name and does not support: whoever sets one is told so at once.

To support one, delete its row.
"""

from dataclasses import dataclass

from shared.settings import ServiceSettings, fail


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a setting is refused, and which values ask for nothing and so are let through."""

    reason: str
    harmless: tuple[object, ...] = ()


REFUSALS = {
    "quantize": Refusal("of the ways to quantise, int8 is supported, on CPUs", harmless=("int8",)),
    "speculate": Refusal("speculative decoding is not supported yet", harmless=(0,)),
    "kv_cache_dtype": Refusal("the KV cache has the dtype of the model; 8-bit caches are not supported yet"),
    "lora_adapters": Refusal("adapters are not supported yet; merge the adapter into the model and serve that"),
    "rope_scaling": Refusal("not supported yet; set rope_parameters in the model's config.json"),
    "rope_factor": Refusal("not supported yet; set rope_parameters in the model's config.json"),
    "weights_cache_override": Refusal("not supported; give the folder that has the weights as the model id"),
    "usage_stats": Refusal("this server sends no usage statistics to anyone", harmless=("off",)),
}


def refuse_unsupported(settings: ServiceSettings, program: str) -> None:
    """Ends the process with one line for each setting that is set and not supported. Raises SystemExit(2) then."""
    defaults = type(settings).model_fields
    lines = [
        f"--{name.replace('_', '-')} (or {name.upper()}): {refusal.reason}"
        for name, refusal in REFUSALS.items()
        if name in defaults
        and getattr(settings, name) != defaults[name].default
        and getattr(settings, name) not in refusal.harmless
    ]
    if lines:
        fail(program, *lines)
