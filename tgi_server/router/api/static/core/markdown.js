// Markdown as elements. A model's text is never trusted: no HTML of its own, no images that the browser would load.

import "../vendor/purify.min.js";
import hljs from "../vendor/highlight.min.js";
import { Marked } from "../vendor/marked.esm.js";
import { copyText, make } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "a"],
    ...["strong", "em", "del", "table", "thead", "tbody", "tr", "th", "td", "span"],
  ],
  ALLOWED_ATTR: ["href", "title", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};
// Code of more characters is not coloured: that would take long at every token.
const MOST_COLOURED = 50_000;

const escaped = (text) =>
  text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
const sanitized = (html) => globalThis.DOMPurify.sanitize(html, ALLOWED);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
    code: ({ text, lang }) => `<pre><code title="${escaped(lang?.split(/\s/)[0] ?? "")}">${escaped(text)}</code></pre>`,
  },
});

/** Shows a text that grows. Renders only the blocks that change, so that selections and focus stay. */
export class MarkdownView {
  constructor() {
    this.element = make("div", { className: "markdown" });
    this.blocks = [];
  }

  update(text) {
    const tokens = marked.lexer(text);
    const sources = tokens.filter((token) => token.type !== "space");
    sources.forEach((token, index) => {
      if (this.blocks[index]?.raw === token.raw) return;
      const block = make("div", { className: "block" }, rendered([token], tokens.links));
      if (this.blocks[index]) this.blocks[index].element.replaceWith(block);
      else this.element.append(block);
      this.blocks[index] = { raw: token.raw, element: block };
    });
    for (const { element } of this.blocks.splice(sources.length)) element.remove();
  }
}

function rendered(tokens, links) {
  const fragment = sanitized(marked.parser(Object.assign(tokens, { links })));
  for (const link of fragment.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = make("div", { className: "table", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    code.parentElement.replaceWith(codeBlock(code.textContent.replace(/\n$/, ""), code.title));
  }
  return fragment;
}

/** Returns an element with code in its language's colours, and a button that copies it. */
export function codeBlock(text, language) {
  const copy = make("button", { type: "button", className: "quiet", on: { click: () => copied(copy, text) } }, "Copy");
  const code = make("code", { className: "hljs" });
  code.append(coloured(text, language));
  return make(
    "figure",
    { className: "code" },
    make("figcaption", {}, make("span", {}, language || "text"), copy),
    make("pre", { tabIndex: 0, "aria-label": `Code, ${language || "text"}` }, code),
  );
}

/** Returns a text in the colours of its language; as it is if the language is not known. */
export function coloured(text, language) {
  if (!hljs.getLanguage(language) || text.length > MOST_COLOURED) return document.createTextNode(text);
  return sanitized(hljs.highlight(text, { language, ignoreIllegals: true }).value);
}

async function copied(button, text) {
  await copyText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
