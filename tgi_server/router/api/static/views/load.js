// How busy the server is, and its limits, in a dialog.

import { element, make, number } from "../core/dom.js";
import { parseMetrics } from "../core/metrics.js";
import { Chart } from "./chart.js";

const EVERY_MS = 1000;
const LIMITS = {
  model_id: "Model",
  max_input_tokens: "Tokens of a prompt",
  max_total_tokens: "Prompt and answer together",
  max_concurrent_requests: "Requests at a time",
  max_stop_sequences: "Stop sequences",
  model_device_type: "Device",
  model_dtype: "Number format",
  quantization: "Quantization",
  batches: "Batches",
  version: "Version",
};

/** Fills the dialog; it asks for metrics only while it is open. */
export function showLoad(dialog, info) {
  const values = { ...info, batches: info.paged ? "paged" : "padded, which is slower" };
  for (const [name, label] of Object.entries(LIMITS)) {
    if (values[name] === null || values[name] === undefined) continue;
    const value = typeof values[name] === "number" ? number(values[name]) : values[name];
    element("limits").append(make("div", {}, make("dt", {}, label), make("dd", {}, value)));
  }
  const charts = {
    throughput: new Chart(element("throughput"), 1, 10),
    queue: new Chart(element("queue"), 2, 4),
    kv: new Chart(element("kv"), 1, 100),
  };
  let before = null;
  let last = 0;
  const ask = async () => {
    if (!dialog.open || document.hidden) return;
    const response = await fetch("metrics").catch(() => null);
    element("load-fault").hidden = Boolean(response?.ok);
    if (!response?.ok) return;
    const metrics = parseMetrics(await response.text());
    const now = { at: performance.now(), tokens: metrics.get("tgi_request_generated_tokens_sum") ?? 0 };
    const recent = before && now.at - last < 3 * EVERY_MS;
    const rate = recent ? Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.at - before.at)) : 0;
    before = now;
    last = now.at;
    draw(charts, metrics, rate);
  };
  setInterval(ask, EVERY_MS);
  dialog.addEventListener("toggle", ask);
}

function draw(charts, metrics, rate) {
  const read = (name) => metrics.get(name) ?? 0;
  const waiting = read("tgi_queue_size");
  const running = read("tgi_batch_current_size");
  const share = (100 * read("tgi_batch_current_max_tokens")) / Math.max(1, read("tgi_kv_capacity_tokens"));
  charts.throughput.add(rate);
  charts.queue.add(running, waiting);
  charts.kv.add(share);
  element("throughput-now").textContent = number(rate);
  element("queue-now").textContent = `${waiting} waiting, ${running} running`;
  element("kv-now").textContent = `${number(share, 1)} %`;
}
