"""Writes a `tokenizer.json` for a model that has only older tokenizer files: `... MODEL_FOLDER OUTPUT_FOLDER`.

Runs as a process of its own, so that the router itself never loads `transformers`.
"""

import sys


def main(model: str, output: str) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model, local_files_only=True).backend_tokenizer.save(f"{output}/tokenizer.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
