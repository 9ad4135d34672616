// Shows an answer as its tokens: the less likely a token was, the stronger is its background colour.

import { make, number } from "../core/dom.js";

const percent = (logprob) => `${number(100 * Math.exp(logprob), 1)} %`;
const known = (logprob) => logprob !== null && Number.isFinite(logprob);

/** Shows tokens (see stream.js). A click, or the arrow keys, tell of one how likely it was, and which others were. */
export class TokensView {
  /** drafts: true where the server speculates, so that tokens may have been drafted. */
  constructor(drafts) {
    this.list = make("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens by probability" });
    this.detail = make("p", { className: "token-detail", role: "status" }, "Choose a token with a click or the arrow keys.");
    const swatch = (kind) => make("span", { className: `swatch ${kind}` });
    const legend = make("p", { className: "legend" }, swatch("sure"), "likely", swatch("unsure"), "unlikely");
    if (drafts) legend.append(swatch("drafted"), "drafted, and accepted");
    this.element = make("div", {}, this.list, make("div", { className: "token-notes" }, this.detail, legend));
    this.tokens = [];
    this.list.addEventListener("click", (event) => this.choose(event.target.closest(".token")));
    this.list.addEventListener("keydown", (event) => this.walk(event));
  }

  update(tokens) {
    for (const token of tokens.slice(this.tokens.length)) {
      this.tokens.push(token);
      this.list.append(shaded(token));
    }
  }

  walk(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    const chosen = this.list.querySelector(".chosen");
    this.choose(chosen ? chosen[step] : this.list.querySelector(".token"));
  }

  choose(span) {
    if (!span) return;
    this.list.querySelector(".chosen")?.classList.remove("chosen");
    span.classList.add("chosen");
    span.scrollIntoView({ block: "nearest" });
    const { text, logprob, drafted, others } = this.tokens[[...this.list.children].indexOf(span)];
    const entry = (name, value) => make("span", { className: "candidate" }, JSON.stringify(name), " ", make("b", {}, value));
    const rest = others.filter(([other]) => other !== text);
    this.detail.replaceChildren(
      entry(text, known(logprob) ? percent(logprob) : "?"),
      drafted ? "drafted " : "",
      rest.length ? "instead: " : "",
      ...rest.map(([other, likelihood]) => entry(other, percent(likelihood))),
    );
  }
}

function shaded({ text, logprob, drafted }) {
  const span = make("span", { className: drafted ? "token drafted" : "token" }, text);
  if (known(logprob)) {
    const doubt = Math.round(70 * (1 - Math.exp(logprob)));
    span.style.backgroundColor = `color-mix(in srgb, var(--doubt) ${doubt}%, transparent)`;
    span.title = percent(logprob);
  }
  return span;
}
