// An error in the place of an answer: a description, advice, and a button that follows the advice.

import { make } from "../core/dom.js";
import { apiKey } from "../core/server.js";

/** Returns {element} for message.error. actions.retry(message): tries again. actions.openOptions(): opens the options. */
export function failureView(actions, message) {
  const retry = () => actions.retry(message);
  return { element: failureOf(message.error, retry, actions.openOptions), update: () => {} };
}

/** Returns an element for an error ({message, status, advice}). */
export function failureOf({ message, status, advice }, retry, openOptions) {
  const again = make("button", { type: "button", className: "primary", on: { click: retry } }, "Try again");
  const options = make("button", { type: "button", on: { click: openOptions } }, "Options");
  const buttons = /option/i.test(advice) && openOptions ? [again, options] : [again];
  return make(
    "div",
    { className: "failure", role: "alert" },
    make("p", {}, make("b", {}, message)),
    advice && make("p", {}, advice),
    status === 401 ? keyForm(retry) : make("div", { className: "buttons" }, ...buttons),
  );
}

function keyForm(retry) {
  const field = make("input", { type: "password", autocomplete: "off", required: true, "aria-label": "API key", placeholder: "API key", value: apiKey.get() });
  const submit = (event) => {
    event.preventDefault();
    apiKey.set(field.value);
    retry();
  };
  return make(
    "form",
    { className: "key", on: { submit } },
    field,
    make("button", { type: "submit", className: "primary" }, "Use this key"),
    make("p", { className: "hint" }, "It is forgotten when you close this tab."),
  );
}
