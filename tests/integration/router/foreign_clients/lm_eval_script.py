"""Asks a server through lm-eval's `local-completions`; runs in an environment that has it.

    lm_eval_script.py URL MODEL

MODEL: the folder of the model's tokenizer. Standard input: JSON of pairs of context and continuation, of whole texts,
and of prompts.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model = sys.argv[1:]
asked = json.load(sys.stdin)
api = LocalCompletionsAPI(
    base_url=f"{url}/v1/completions",
    pretrained="demo",
    tokenizer=model,
    tokenizer_backend="huggingface",
    max_length=64,
    batch_size=3,
)


def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


options = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
print(
    json.dumps(
        {
            "likelihood": api.loglikelihood(requests("loglikelihood", [tuple(pair) for pair in asked["pairs"]])),
            "rolling": api.loglikelihood_rolling(
                requests("loglikelihood_rolling", [(text,) for text in asked["texts"]])
            ),
            "generated": api.generate_until(
                requests("generate_until", [(prompt, dict(options)) for prompt in asked["prompts"]])
            ),
        }
    )
)
