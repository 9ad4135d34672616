// What an empty conversation shows.

import { make } from "../core/dom.js";

const DEMO = "oatmill-demo";
const EXAMPLES = [
  "How do I hang a picture?",
  "How long do I boil potatoes?",
  "How do I sharpen a knife?",
  "What can I use instead of butter?",
];

/** Fills the place of an empty conversation, or hides it. ask: sends an example. */
export function welcome(place, info, hidden, ask) {
  place.hidden = hidden;
  if (hidden || place.dataset.model === info.model_id) return;
  place.dataset.model = info.model_id;
  const title = make("h2", {}, "What would you like to know?");
  if (info.model_id !== DEMO) {
    place.replaceChildren(title);
    return;
  }
  const examples = EXAMPLES.map((text) => make("button", { type: "button", on: { click: () => ask(text) } }, text));
  place.replaceChildren(
    title,
    make("div", { className: "examples" }, ...examples),
    make(
      "p",
      { className: "hint" },
      "This is the bundled demo model: 3.5 million parameters that know a little of cooking and DIY. Serve a real one with ",
      make("code", {}, "oatmill serve OWNER/MODEL"),
      ".",
    ),
  );
}
