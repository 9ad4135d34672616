// What an embedding model is tried with: how similar texts are.

import { copyText, make, number } from "../core/dom.js";
import { bar, encoderForm } from "./encoder_form.js";
import { TextList } from "./text_list.js";

const SHOWN_COLUMNS = 6;

export function similarityView(encoder) {
  const list = new TextList("Text", 2, ["How do I hang a picture?", "Putting a frame on the wall", "A recipe for pancakes"]);
  const columns = `${encoder.model_id} makes ${number(encoder.columns)} numbers of a text. `;
  return encoderForm({
    title: "Similarity of texts",
    explanation: `${columns}The cosine of two such vectors says how similar the texts are: 1 means the same.`,
    fields: [list.element],
    label: "Compare",
    request: () => (list.texts.length < 2 ? "Write at least two texts." : { path: "embed", body: { inputs: list.texts } }),
    results: (vectors) => [pairs(vectors), ...vectors.map(vectorView)],
  });
}

/** The vectors have length 1: their products are the cosines. */
const cosine = (one, other) => one.reduce((sum, value, column) => sum + value * other[column], 0);

function pairs(vectors) {
  const rows = vectors.flatMap((one, first) =>
    vectors.slice(first + 1).map((other, offset) => ({ first, second: first + 1 + offset, value: cosine(one, other) })),
  );
  rows.sort((one, other) => other.value - one.value);
  const items = rows.map(({ first, second, value }) =>
    make("li", {}, make("span", {}, `Texts ${first + 1} and ${second + 1}`), bar(value), make("b", {}, value.toFixed(3))),
  );
  return make("ol", { className: "scores" }, ...items);
}

function vectorView(vector, index) {
  const beginning = vector.slice(0, SHOWN_COLUMNS).map((value) => value.toFixed(4));
  const copy = make("button", { type: "button", className: "quiet", on: { click: () => copyText(JSON.stringify(vector)) } }, "Copy");
  return make("p", { className: "vector" }, `Vector ${index + 1}: `, make("code", {}, `${beginning.join(", ")}, \u2026`), " ", copy);
}
