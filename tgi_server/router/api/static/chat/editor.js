// A field in which a message is changed, in its own place.

import { make } from "../core/dom.js";

/** Returns {element, focus}. save: called with the new text. close: called to leave everything as it was. */
export function editor(message, { save, close }) {
  const isQuestion = message.role === "user";
  const field = make("textarea", { value: message.text, rows: 3, "aria-label": "Text of the message" });
  const keep = () => field.value.trim() && save(field.value);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && isQuestion) {
      event.preventDefault();
      keep();
    }
  });
  const element = make(
    "div",
    { className: "editor" },
    field,
    make(
      "div",
      { className: "buttons" },
      make("button", { type: "button", className: "primary", on: { click: keep } }, isQuestion ? "Send" : "Save"),
      make("button", { type: "button", on: { click: close } }, "Cancel"),
    ),
  );
  return { element, focus: () => field.focus() };
}
