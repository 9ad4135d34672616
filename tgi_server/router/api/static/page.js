// The page: what is served, a prompt to try it with, and how busy the server is.

import { Chart } from "./chart.js";
import { codeFor } from "./code.js";
import { Images, picture } from "./images.js";
import { watchMetrics } from "./metrics.js";
import { contentOf, generate } from "./stream.js";

const LIMITS = {
  max_input_tokens: "Tokens of a prompt",
  max_total_tokens: "Prompt and answer together",
  max_concurrent_requests: "Requests at a time",
  max_best_of: "Best of",
  max_stop_sequences: "Stop sequences",
  model_device_type: "Device",
  model_dtype: "Number format",
  batches: "Batches",
  version: "Version",
};

const element = (id) => document.getElementById(id);
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

async function showInfo() {
  const info = await (await fetch("info")).json();
  info.batches = info.paged ? "paged" : "padded, which is slower";
  element("model").textContent = info.model_id;
  document.title = info.model_id;
  for (const [name, label] of Object.entries(LIMITS)) {
    const entry = document.createElement("div");
    const term = document.createElement("dt");
    const value = document.createElement("dd");
    term.textContent = label;
    value.textContent = typeof info[name] === "number" ? number(info[name]) : info[name];
    entry.append(term, value);
    element("limits").append(entry);
  }
  element("drafted-legend").hidden = !info.speculate;
  element("image-field").hidden = !info.reads_images;
  images.accepted = info.reads_images;
  element("adapter-field").hidden = !info.adapters.length;
  for (const { id } of info.adapters) element("adapter").append(new Option(id));
}

function showLoad() {
  const throughput = new Chart(element("throughput"), 1, 10);
  const queue = new Chart(element("queue"), 2, 4);
  const kv = new Chart(element("kv"), 1, 100);
  let before = null;
  watchMetrics((metrics) => {
    element("health").textContent = metrics ? "serving" : "the server does not answer";
    element("health").classList.toggle("down", !metrics);
    if (!metrics) return;
    const read = (name) => metrics.get(name) ?? 0;
    const now = { at: performance.now(), tokens: read("tgi_request_generated_tokens_sum") };
    const rate = before ? Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.at - before.at)) : 0;
    before = now;
    const waiting = read("tgi_queue_size");
    const running = read("tgi_batch_current_size");
    const share = (100 * read("tgi_batch_current_max_tokens")) / Math.max(1, read("tgi_kv_capacity_tokens"));
    throughput.add(rate);
    queue.add(running, waiting);
    kv.add(share);
    element("throughput-now").textContent = number(rate);
    element("queue-now").textContent = `${waiting} waiting, ${running} running`;
    element("kv-now").textContent = `${number(share, 1)} %`;
  });
}

// Earlier messages of the conversation, as the API has them, and the prompt and answer that are not among them yet.
let turns = [];
let latest = null;
const images = new Images(element("form"), element("images"), element("image-file"), () => showCode());

function wish() {
  const seed = element("seed").value;
  return {
    prompt: element("prompt").value,
    images: images.urls,
    chat: element("mode").value === "chat",
    system: element("system").value.trim(),
    turns: [...turns, ...(latest ?? [])],
    maxNewTokens: Number(element("max-new-tokens").value),
    temperature: Number(element("temperature").value),
    topP: Number(element("top-p").value),
    seed: seed === "" ? undefined : Number(seed),
    stop: element("stop-sequence").value,
    adapter: element("adapter").value,
    apiKey: element("api-key").value,
  };
}

/** The less likely a token was, the more of the colour of doubt is behind it. Drafted ones are marked below. */
function shaded(token) {
  const span = document.createElement("span");
  span.className = token.drafted ? "token drafted" : "token";
  span.textContent = token.text;
  if (token.logprob !== null && Number.isFinite(token.logprob)) {
    const probability = Math.exp(token.logprob);
    const doubt = Math.round(70 * (1 - probability));
    span.style.backgroundColor = `color-mix(in srgb, var(--doubt) ${doubt}%, transparent)`;
    span.title = `${number(100 * probability, 1)} %`;
  }
  return span;
}

function choose(token) {
  if (!token) return;
  element("answer").querySelector(".chosen")?.classList.remove("chosen");
  token.classList.add("chosen");
  const drafted = token.classList.contains("drafted") ? ", drafted" : "";
  element("token-detail").textContent = `${JSON.stringify(token.textContent)}: ${token.title || "?"}${drafted}`;
  token.scrollIntoView({ block: "nearest" });
}

function listenToTokens() {
  const answer = element("answer");
  answer.addEventListener("click", (event) => choose(event.target.closest(".token")));
  answer.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    if (!steps[event.key]) return;
    event.preventDefault();
    const chosen = answer.querySelector(".chosen");
    choose(chosen ? chosen[steps[event.key]] : answer.querySelector(".token"));
  });
}

/** Moves the latest prompt and answer among the earlier turns of the conversation. */
function foldLatest() {
  for (const message of latest ?? []) {
    const item = document.createElement("li");
    item.className = message.role;
    const parts = typeof message.content === "string" ? [{ text: message.content }] : message.content;
    for (const { text, image_url } of parts) item.append(image_url ? picture(image_url.url, "Image") : text);
    element("turns").append(item);
    turns.push(message);
  }
  latest = null;
  element("forget").hidden = !turns.length;
}

function forget() {
  turns = [];
  latest = null;
  element("turns").replaceChildren();
  element("answer").replaceChildren();
  element("forget").hidden = true;
  showCode();
}

function showCode() {
  const url = location.href.replace(/[?#].*$/, "").replace(/\/$/, "");
  // Images are shown by their beginnings: the code is to be read.
  const shortened = (_, value) =>
    typeof value === "string" && value.startsWith("data:image/") ? `${value.split(",")[0]},...` : value;
  const shown = JSON.parse(JSON.stringify(wish(), shortened));
  element("snippet").textContent = codeFor(shown, element("language").value, url);
}

/** Copies the code; where the browser does not allow that, selects it. */
async function copyCode() {
  try {
    await navigator.clipboard.writeText(element("snippet").textContent);
    element("announcement").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(element("snippet"));
  }
}

function showTimings(started, first, count) {
  const now = performance.now();
  element("first-token").textContent = `${number(first - started)} ms`;
  element("tokens").textContent = number(count);
  element("rate").textContent = count > 1 ? number((1000 * (count - 1)) / (now - first), 1) : "\u2013";
  element("total").textContent = `${number((now - started) / 1000, 2)} s`;
}

async function run(signal) {
  const answer = element("answer");
  if (element("mode").value === "chat") foldLatest();
  const request = wish();
  answer.replaceChildren();
  const started = performance.now();
  let first = 0;
  let count = 0;
  for await (const token of generate(request, signal)) {
    first ||= performance.now();
    count += 1;
    answer.append(shaded(token));
    showTimings(started, first, count);
  }
  if (!request.chat) return;
  latest = [{ role: "user", content: contentOf(request) }, { role: "assistant", content: answer.textContent }];
  images.sent();
  element("forget").hidden = false;
}

function showError(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) element("key-field").hidden = false;
  const text = error instanceof TypeError ? "The server does not answer: is it still running?" : error.message;
  const paragraph = document.createElement("p");
  paragraph.className = "error";
  paragraph.setAttribute("role", "alert");
  paragraph.textContent = text;
  element("answer").append(paragraph);
}

function listen() {
  let running = null;
  element("stop").addEventListener("click", () => running?.abort());
  element("forget").addEventListener("click", forget);
  element("copy").addEventListener("click", copyCode);
  element("language").addEventListener("change", showCode);
  element("form").addEventListener("input", showCode);
  element("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    running = new AbortController();
    element("generate").disabled = true;
    element("stop").disabled = false;
    element("answer").setAttribute("aria-busy", "true");
    element("announcement").textContent = "";
    await run(running.signal).catch(showError);
    element("answer").setAttribute("aria-busy", "false");
    element("announcement").textContent = "The answer is there.";
    element("generate").disabled = false;
    element("stop").disabled = true;
    showCode();
  });
}

listen();
listenToTokens();
showLoad();
showCode();
showInfo().catch(() => {});
