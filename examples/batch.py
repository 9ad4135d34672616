"""A batch of questions, answered by a model in this process: no server runs. The answers are JSON objects, one a line.

python examples/batch.py [MODEL] < questions.txt > answers.jsonl
"""

import json
import sys

from pydantic import BaseModel, Field

from oatmill import LLM  # before torch, if the program imports that, too


class Answer(BaseModel):
    topic: str = Field(pattern="^(cooking|tools|other)$")
    answer: str = Field(max_length=200)


def main() -> None:
    questions = [line.strip() for line in sys.stdin if line.strip()]
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the bundled demo model
    with LLM(model, max_total_tokens=1024) as llm:
        conversations = [[{"role": "user", "content": question}] for question in questions]
        results = llm.chat(conversations, schema=Answer, temperature=0, max_tokens=300)
    for question, result in zip(questions, results, strict=True):
        if result.finish_reason == "stop":
            print(json.dumps({"question": question} | Answer.model_validate_json(result.text).model_dump()))
        else:
            print(f"no answer to {question!r}: {result.finish_reason}", file=sys.stderr)
    print(f"{sum(result.usage.completion_tokens for result in results)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
