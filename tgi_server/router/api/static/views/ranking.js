// What a reranker is tried with: which documents fit a question. A classifier is asked for its labels.

import { make } from "../core/dom.js";
import { bar, encoderForm } from "./encoder_form.js";
import { TextList } from "./text_list.js";

export function rankingView(encoder) {
  const query = make("textarea", { rows: 2, value: "How do I hang a picture?", "aria-label": "Question" });
  const documents = new TextList("Document", 1, [
    "Boil the egg for six minutes.",
    "Drive a nail into the wall and put the frame on it.",
    "A level shows if a shelf is straight.",
  ]);
  return encoderForm({
    title: "Ranking of documents",
    explanation: `${encoder.model_id} scores how well each document answers the question.`,
    fields: [make("label", { className: "field wide" }, make("span", {}, "Question"), query), documents.element],
    label: "Rank",
    request() {
      if (!query.value.trim() || !documents.texts.length) return "Write a question and at least one document.";
      this.texts = documents.texts;
      return { path: "rerank", body: { query: query.value.trim(), texts: this.texts } };
    },
    results(ranks) {
      return [scores(ranks.map(({ index, score }) => [this.texts[index], score]))];
    },
  });
}

export function labelsView(encoder) {
  const text = make("textarea", { rows: 3, value: "The picture hangs straight, and I am happy.", "aria-label": "Text" });
  return encoderForm({
    title: "Labels of a text",
    explanation: `${encoder.model_id} says how likely each of its ${encoder.columns} labels is.`,
    fields: [text],
    label: "Classify",
    request: () => (text.value.trim() ? { path: "predict", body: { inputs: text.value.trim() } } : "Write a text."),
    results: (labels) => [scores(labels.map(({ label, score }) => [label, score]))],
  });
}

function scores(rows) {
  const items = rows.map(([text, score]) => make("li", {}, make("span", {}, text), bar(score), make("b", {}, score.toFixed(3))));
  return make("ol", { className: "scores" }, ...items);
}
