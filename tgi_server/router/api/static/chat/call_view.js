// Calls of tools that an answer makes, and fields for their results.

import { make } from "../core/dom.js";
import { codeBlock } from "../core/markdown.js";

/** Returns {element, update(calls, context)}. actions.result(message, results): sends the results of all calls. */
export function callView(actions, message) {
  const element = make("div", { className: "calls" });
  const shown = [];
  let form = null;

  const update = (calls, { running, last }) => {
    calls.forEach((call, index) => {
      if (shown[index]?.written === call.arguments) return;
      const card = make(
        "details",
        { className: "call", open: true },
        make("summary", {}, "Calls ", make("b", {}, call.name ?? "a tool")),
        codeBlock(indented(call.arguments), "json"),
      );
      if (shown[index]) shown[index].card.replaceWith(card);
      else element.append(card);
      shown[index] = { card, written: call.arguments };
    });
    const open = !running && last;
    if (open && !form) element.append((form = resultForm(calls, (results) => actions.result(message, results))));
    if (!open && form) {
      form.remove();
      form = null;
    }
  };
  return { element, update };
}

function resultForm(calls, send) {
  const fields = calls.map((call) =>
    make("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returns` }),
  );
  const submit = (event) => {
    event.preventDefault();
    send(calls.map((call, index) => ({ callId: call.id, text: fields[index].value })));
  };
  return make(
    "form",
    { className: "results", on: { submit } },
    ...fields,
    make("button", { type: "submit", className: "primary" }, calls.length > 1 ? "Send results" : "Send result"),
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
