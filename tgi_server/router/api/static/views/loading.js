// What the page shows while the model loads, or while the server is away.

import { element } from "../core/dom.js";
import { get, loadingProgress } from "../core/server.js";

const EVERY_MS = 1000;

/** Returns the server's /info as soon as it gives it; shows meanwhile how far it is. */
export async function whenReady() {
  for (;;) {
    try {
      const info = await get("info");
      element("loading").hidden = true;
      return info;
    } catch (error) {
      show(error);
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }
}

function show(error) {
  const progress = loadingProgress(error);
  const bar = element("loading-bar");
  element("loading").hidden = false;
  element("loading-title").textContent = progress ? "The model is loading" : "The server does not answer";
  if (progress) bar.value = progress.percent;
  else bar.removeAttribute("value");
  const detail = progress ? `${progress.percent} %: ${progress.stage}` : `${error.message} Trying again every second.`;
  element("loading-detail").textContent = detail;
}
