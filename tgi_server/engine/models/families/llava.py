"""Models that read images beside a text model of any family: LLaVA, Idefics 3, InternVL, Mistral 3, SmolVLM."""

from tgi_server.engine.models.spec import Family

FAMILIES = dict.fromkeys(("idefics3", "internvl", "llava", "llava_next", "mistral3", "smolvlm"), Family(images=True))
