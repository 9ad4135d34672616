// What the page shows while the model loads, or while the server is away.

import { element } from "../core/dom.js";
import { get, loadingProgress } from "../core/server.js";

const EVERY_MS = 1000;

export const generates = ({ model_pipeline_tag: pipeline }) => /generation$/.test(pipeline);

/** Returns the server's /info, or that of its first model that generates, once loaded; meanwhile shows the progress. */
export async function whenReady() {
  for (;;) {
    try {
      const info = await get("info");
      const generating = !generates(info) && info.models?.[0];
      const found = generating ? await whenLoaded(generating, info) : info;
      element("loading").hidden = true;
      return found;
    } catch (error) {
      show(error);
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }
}

/** Returns the /info of a model; `otherwise` if the model cannot be loaded. */
async function whenLoaded(name, otherwise) {
  element("loading").hidden = false;
  element("loading-title").textContent = "The model is loading";
  element("loading-detail").textContent = name;
  element("loading-bar").removeAttribute("value");
  return get(`info?model=${encodeURIComponent(name)}`).catch(() => otherwise);
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
