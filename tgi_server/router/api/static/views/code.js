// The request of the conversation as code, in a dialog.

import { element } from "../core/dom.js";
import { coloured } from "../core/markdown.js";
import { copyText } from "../core/dom.js";
import { codeFor } from "../core/code.js";
import { apiKey } from "../core/server.js";
import { essential } from "../chat/request.js";

const COLOURS = { curl: "bash", Python: "python", gRPC: "python" };

/** dialog: is filled whenever it opens. current(): returns {path, body}, or throws an error that says what is wrong. */
export function showCode(dialog, current) {
  const language = element("language");
  const snippet = element("snippet");
  const fill = () => {
    const url = location.href.replace(/[?#].*$/, "").replace(/\/$/, "");
    try {
      const { path, body } = current();
      const code = codeFor({ path, body: essential(body) }, language.value, url, Boolean(apiKey.get()));
      snippet.replaceChildren(coloured(code, COLOURS[language.value]));
    } catch (error) {
      snippet.textContent = `${error.message} ${error.advice ?? ""}`;
    }
  };
  language.addEventListener("change", fill);
  element("copy-code").addEventListener("click", () => copyText(snippet.textContent));
  dialog.addEventListener("beforetoggle", (event) => event.newState === "open" && fill());
}
