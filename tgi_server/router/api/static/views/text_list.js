// Fields for several texts. Fields can be added and removed.

import { make } from "../core/dom.js";
import { icon } from "../core/icons.js";

export class TextList {
  /** name: the name of one text, such as "Text". least: minimum number of fields. texts: the initial texts. */
  constructor(name, least, texts) {
    Object.assign(this, { name, least });
    this.fields = make("div", { className: "text-list" });
    const add = make("button", { type: "button", on: { click: () => this.add("").focus() } }, icon("plus"), `Add a ${name.toLowerCase()}`);
    this.element = make("div", {}, this.fields, add);
    for (const text of texts) this.add(text);
  }

  /** Returns the texts that are not empty. */
  get texts() {
    return [...this.fields.querySelectorAll("textarea")].map(({ value }) => value.trim()).filter(Boolean);
  }

  add(text) {
    const field = make("textarea", { rows: 2, value: text });
    const remove = make("button", { type: "button", className: "tool", title: "Remove" }, icon("close"));
    const row = make("div", { className: "text-row" }, field, remove);
    remove.addEventListener("click", () => {
      row.remove();
      this.number();
    });
    this.fields.append(row);
    this.number();
    return field;
  }

  number() {
    const rows = [...this.fields.children];
    rows.forEach((row, index) => {
      const name = `${this.name} ${index + 1}`;
      row.querySelector("textarea").setAttribute("aria-label", name);
      row.querySelector("textarea").placeholder = name;
      row.querySelector("button").setAttribute("aria-label", `Remove ${name.toLowerCase()}`);
      row.querySelector("button").hidden = rows.length <= this.least;
    });
  }
}
