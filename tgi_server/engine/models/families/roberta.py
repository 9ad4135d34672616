"""RoBERTa, and encoders that count positions as it does."""

from tgi_server.engine.models.spec import Family

FAMILIES = dict.fromkeys(
    ("camembert", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    Family(padding_first=True),
)
