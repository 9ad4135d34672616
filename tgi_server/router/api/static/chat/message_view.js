// One message of the transcript.

import { copyText, make, number } from "../core/dom.js";
import { icon } from "../core/icons.js";
import { MarkdownView } from "../core/markdown.js";
import { callView } from "./call_view.js";
import { editor } from "./editor.js";
import { failureView } from "./failure_view.js";
import { TokensView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Result of a tool" };
// Of shorter answers no rate is told: it would be chance.
const LEAST_SECONDS = 0.05;
const ENDINGS = {
  length: "The answer was cut: it reached the limit of tokens.",
  stopped: "You stopped the answer.",
  unfinished: "The page was left before the answer was complete.",
  timeout: "The answer was cut: its time was over.",
};

export class MessageView {
  /**
   * message: see conversation.js. actions: functions of its buttons: {edit(message, text), regenerate, resume, show,
   * result, speakOptions}. context: see `update`.
   */
  constructor(message, actions, context) {
    this.message = message;
    this.actions = actions;
    this.body = make("div", { className: "body" });
    this.foot = make("div", { className: "foot" });
    this.element = make(
      "article",
      { className: `message ${message.role}`, "aria-label": NAMES[message.role], data: { id: message.id } },
      this.body,
      this.foot,
    );
    this.update(context);
  }

  /** context: {running, siblings, last, drafts, waiting, probabilities}; waiting: why the model does not answer yet. */
  update(context) {
    this.context = context;
    if (this.editing) return;
    if (this.message.role === "assistant") this.showAnswer();
    else this.showText();
    this.showFoot();
  }

  showText() {
    const { text, images = [], role } = this.message;
    const pictures = images.map((url, index) => make("img", { src: url, alt: `Image ${index + 1}` }));
    const label = role === "tool" && make("p", { className: "label" }, NAMES.tool);
    this.body.replaceChildren(
      ...[label, pictures.length && make("div", { className: "pictures" }, ...pictures)].filter(Boolean),
      ...(text ? [make("div", { className: "text" }, text)] : []),
    );
  }

  showAnswer() {
    const { message, context } = this;
    const asTokens = context.probabilities && message.tokens?.length > 0;
    this.element.setAttribute("aria-busy", String(context.running));
    this.part("thoughts", message.thoughts, () => this.thoughtsView())?.update(message);
    this.part("markdown", message.text && !asTokens, () => new MarkdownView())?.update(message.text);
    this.part("tokens", asTokens, () => new TokensView(context.drafts))?.update(message.tokens ?? []);
    const calls = (message.calls ?? []).filter(Boolean);
    this.part("calls", calls.length, () => callView(this.actions, message))?.update(calls, context);
    const silent = context.running && !message.text && !message.thoughts && !calls.length;
    this.part("waiting", silent, waitingView)?.update(context.waiting);
    this.part("ending", !context.running && this.ending, () => this.endingView())?.update(this.ending);
    this.part("failure", !context.running && message.error, () => failureView(this.actions, message));
  }

  /** Returns what tells why an answer is not whole; "" if it is. */
  get ending() {
    const { end, error } = this.message;
    return error ? "" : (ENDINGS[end ?? "unfinished"] ?? "");
  }

  /** Tells that an answer is not whole, and offers to continue it. */
  endingView() {
    const text = make("span");
    const resume = () => this.actions.resume(this.message);
    const button = make("button", { type: "button", className: "quiet", on: { click: resume } }, "Continue");
    const update = (ending) => {
      text.textContent = ending;
      button.hidden = !this.context.last || !this.message.text || Boolean(this.message.calls?.length);
    };
    return { element: make("p", { className: "ending" }, text, button), update };
  }

  /** Returns the view of a part of the answer, made when it is first needed; null, and gone, if it is not. */
  part(name, needed, create) {
    this.parts ??= {};
    const known = this.parts[name];
    if (!needed) {
      known?.element.remove();
      delete this.parts[name];
      return null;
    }
    if (known) return known;
    const view = (this.parts[name] = create());
    view.element.dataset.part = name;
    const order = ["thoughts", "markdown", "tokens", "calls", "waiting", "ending", "failure"];
    const next = [...this.body.children].find((child) => order.indexOf(child.dataset.part) > order.indexOf(name));
    this.body.insertBefore(view.element, next ?? null);
    return view;
  }

  thoughtsView() {
    const markdown = new MarkdownView();
    const summary = make("summary", {}, "");
    const element = make("details", { className: "thoughts" }, summary, markdown.element);
    const tokens = new TokensView(this.context.drafts);
    const update = (message) => {
      const thinking = this.context.running && !message.text && !message.calls?.length;
      summary.textContent = thinking ? "Thinking\u2026" : "Thoughts";
      summary.classList.toggle("active", thinking);
      if (this.context.probabilities && message.thoughtTokens?.length) {
        tokens.update(message.thoughtTokens);
        if (!tokens.element.isConnected) markdown.element.replaceWith(tokens.element);
      } else {
        markdown.update(message.thoughts);
        if (!markdown.element.isConnected) tokens.element.replaceWith(markdown.element);
      }
    };
    return { element, update };
  }

  showFoot() {
    const { message, context, actions } = this;
    const kept = this.foot.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    const button = (action, name, symbol, run) =>
      make("button", { type: "button", className: "tool", title: name, "aria-label": name, data: { action }, on: { click: run } }, icon(symbol));
    const buttons = [];
    if (!context.running) {
      if (message.text) buttons.push(button("copy", "Copy", "copy", () => copyText(message.text)));
      if (message.role !== "tool") buttons.push(button("edit", "Edit", "edit", () => this.edit()));
      if (message.role === "assistant") {
        buttons.push(button("again", "Regenerate", "again", () => actions.regenerate(message)));
      }
    }
    this.foot.replaceChildren(...this.branches(button), ...buttons, this.statistics());
    if (kept) this.foot.querySelector(`[data-action=${kept}]`)?.focus();
  }

  branches(button) {
    const { siblings } = this.context;
    if (siblings.length < 2) return [];
    const index = siblings.indexOf(this.message);
    const to = (offset) => () => this.actions.show(siblings[index + offset]);
    const earlier = button("earlier", "Earlier version", "left", to(-1));
    const later = button("later", "Later version", "right", to(1));
    earlier.disabled = index === 0;
    later.disabled = index === siblings.length - 1;
    return [earlier, make("span", { className: "version" }, `${index + 1} / ${siblings.length}`), later];
  }

  statistics() {
    const { tokens, first, seconds, prompt } = this.message.statistics ?? {};
    const line = make("span", { className: "statistics" });
    if (!tokens || first === null) return line;
    const rate = seconds - first > LEAST_SECONDS ? `${number((tokens - 1) / (seconds - first), 1)} tokens/s` : "";
    const whole = [`${number(tokens)} tokens`, rate].filter(Boolean).join(" \u00b7 ");
    const asked = prompt ? `prompt of ${number(prompt)} tokens, ` : "";
    line.title = `${asked}first token after ${number(1000 * first)} ms, ${number(seconds, 2)} s in all`;
    line.textContent = whole;
    return line;
  }

  edit() {
    const { message, actions } = this;
    const close = () => {
      this.editing = false;
      this.body.classList.remove("edited");
      this.body.replaceChildren();
      this.parts = {};
      this.update(this.context);
    };
    this.editing = true;
    this.foot.replaceChildren();
    const field = editor(message, { close, save: (text) => (close(), actions.edit(message, text)) });
    this.body.classList.add("edited");
    this.body.replaceChildren(field.element);
    field.focus();
  }
}

/** Shows that an answer has not begun, and why, if that is known. */
function waitingView() {
  const reason = make("em");
  const element = make("p", { className: "waiting" }, make("span"), make("span"), make("span"), reason);
  return { element, update: (text) => (reason.textContent = text) };
}
