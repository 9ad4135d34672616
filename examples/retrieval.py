"""Retrieval: passages are found by embeddings, ranked by a cross-encoder, and put before the question.

oatmill serve CHAT_MODEL --embedding-model-id EMBEDDER --rerank-model-id RANKER
python examples/retrieval.py [URL]
"""

import sys

import httpx
from openai import OpenAI

PASSAGES = [
    "A chisel is sharpened on a wet stone, at 25 degrees, first on a coarse side and then on a fine one.",
    "Soft-boiled eggs take 5 minutes, hard-boiled ones 9.",
    "Wall plugs hold screws in masonry; drill the hole as wide as the plug.",
    "Rice is done when it has taken up twice its volume of water.",
]
QUESTION = "How do I sharpen a chisel?"


def main() -> None:
    url = (sys.argv[1:] or ["http://127.0.0.1:8080"])[0]
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    names = {each["task"]: each["model_id"] for each in httpx.get(f"{url}/info").json()["encoders"]}
    texts = [QUESTION, *PASSAGES]
    whole = {"truncate_prompt_tokens": -1}  # what the model cannot read is cut off
    data = client.embeddings.create(model=names["embed"], input=texts, extra_body=whole).data
    question, *passages = [each.embedding for each in data]
    likeness = [sum(a * b for a, b in zip(question, passage, strict=True)) for passage in passages]
    found = sorted(range(len(PASSAGES)), key=likeness.__getitem__, reverse=True)[:3]
    body = {"query": QUESTION, "texts": [PASSAGES[place] for place in found], "truncate": True}
    ranked = httpx.post(f"{url}/rerank", json=body, timeout=60).raise_for_status().json()
    best = PASSAGES[found[ranked[0]["index"]]]
    print("passage:", best)
    prompt = f"{best}\n\nAnswer from this passage: {QUESTION}"
    answer = client.chat.completions.create(
        model="tgi", messages=[{"role": "user", "content": prompt}], max_tokens=100, temperature=0
    )
    print("answer:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
