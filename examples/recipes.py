"""A recipe assistant: what does a question need, and what is in a recipe?

    python examples/recipes.py [URL]

Decisions generate no text: each is a probability. The parts of the recipe come as an object that fits a model of
pydantic, however small the language model is; bounds on lengths keep it brief.
"""

import sys

import httpx
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION = "How do I make pancakes for four people?"
RECIPE = "Mix 200 g of flour with 3 eggs and 300 ml of milk. Fry thin cakes in butter for 2 minutes on each side."


class Ingredient(BaseModel):
    """One ingredient, as the recipe has it."""

    name: str = Field(max_length=30)
    amount: str = Field(max_length=15)


class Recipe(BaseModel):
    """The spans of a recipe that an assistant needs."""

    ingredients: list[Ingredient] = Field(max_length=5)
    minutes: int = Field(ge=0, le=600)


def main() -> None:
    url = (sys.argv[1:] or ["http://127.0.0.1:8080"])[0]
    body = {
        "input": QUESTION,
        "questions": [
            {"type": "predicate", "name": "search", "instructions": "Does the answer need a recipe from a book?"},
            {
                "type": "choice",
                "name": "topic",
                "instructions": "What is it about?",
                "choices": [{"value": "cooking"}, {"value": "DIY"}, {"value": "something else"}],
            },
        ],
    }
    answer = httpx.post(f"{url}/v1/decisions", json=body, timeout=60)
    answer.raise_for_status()
    for decision in answer.json()["answers"]:
        print(decision)
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    completion = client.chat.completions.parse(
        model="tgi",
        messages=[{"role": "user", "content": f"List ingredients and minutes of this recipe: {RECIPE}"}],
        response_format=Recipe,
        max_tokens=400,
        temperature=0,
    )
    print(completion.choices[0].message.parsed or completion.choices[0].message.content)


if __name__ == "__main__":
    main()
