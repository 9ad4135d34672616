// A form that asks an embedding model, a reranker or a classifier something, and the place of its results.

import { failureOf } from "../chat/failure_view.js";
import { make } from "../core/dom.js";
import { post } from "../core/server.js";

/**
 * Returns the form. view: {title, explanation, label, fields, request, results}. fields: elements in it. request(): returns {path, body}, or a text that says what is missing.
 * results(json): returns elements that show the response.
 */
export function encoderForm(view) {
  const { title, explanation, fields, label } = view;
  const output = make("div", { className: "results", role: "region", "aria-label": "Results", "aria-live": "polite" });
  const button = make("button", { type: "submit", className: "primary" }, label);
  const form = make("form", { className: "encoder" }, make("h2", {}, title), make("p", { className: "hint" }, explanation), ...fields, button, output);
  const run = async () => {
    const asked = view.request();
    if (typeof asked === "string") {
      output.replaceChildren(make("p", { className: "failure", role: "alert" }, asked));
      return;
    }
    button.disabled = true;
    output.setAttribute("aria-busy", "true");
    try {
      output.replaceChildren(...view.results(await (await post(asked.path, asked.body)).json()));
    } catch (error) {
      output.replaceChildren(failureOf(error, run, null));
    }
    output.setAttribute("aria-busy", "false");
    button.disabled = false;
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    if (!button.disabled) run();
  });
  return form;
}

/** Returns a bar for a share of 0 to 1. */
export function bar(share) {
  return make("meter", { min: 0, max: 1, value: Math.max(0, Math.min(1, share)), "aria-hidden": "true" });
}
