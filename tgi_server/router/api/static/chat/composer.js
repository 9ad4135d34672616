// The field for the next message. Enter sends it, Shift+Enter breaks the line.

import { icon } from "../core/icons.js";
import { Images } from "./images.js";

export class Composer {
  /**
   * form: has a textarea, a list of images, and a button that sends, or stops while an answer is generated.
   * actions: {send(text, images), stop(), editLast()}; send returns true if the message was taken.
   */
  constructor(form, actions) {
    this.form = form;
    this.field = form.querySelector("textarea");
    this.button = form.querySelector("[type=submit]");
    this.actions = actions;
    this.images = new Images(document.body, form.querySelector(".images"), form.querySelector("[type=file]"), () => this.changed());
    form.querySelector(".attach").addEventListener("click", () => form.querySelector("[type=file]").click());
    this.field.addEventListener("input", () => this.changed());
    this.field.addEventListener("keydown", (event) => this.key(event));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) actions.stop();
      else this.send();
    });
    this.run(false);
  }

  set readsImages(value) {
    this.images.accepted = value;
    this.form.querySelector(".attach").hidden = !value;
  }

  get text() {
    return this.field.value;
  }

  set text(value) {
    this.field.value = value;
    this.changed();
  }

  focus() {
    this.field.focus();
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.running) this.send();
    }
    if (event.key === "ArrowUp" && !this.field.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  send() {
    if (!this.field.value.trim() && !this.images.urls.length) return;
    if (this.actions.send(this.field.value.trim(), this.images.taken())) this.text = "";
  }

  /** Shows that an answer is generated, or that none is. */
  run(running) {
    this.running = running;
    const name = running ? "Stop (Esc)" : "Send (Enter)";
    this.button.replaceChildren(icon(running ? "stop" : "send"));
    this.button.setAttribute("aria-label", running ? "Stop" : "Send");
    this.button.title = name;
    this.changed();
  }

  changed() {
    this.button.disabled = !this.running && !this.field.value.trim() && !this.images?.urls.length;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }
}
