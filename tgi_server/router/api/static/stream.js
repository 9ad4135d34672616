// Generation, token by token, over the server's own API.

/**
 * Yields {text, logprob, drafted} for each token. wish: {prompt, images, chat, system, turns, adapter, maxNewTokens,
 * temperature, topP, seed, stop, apiKey}; images (data URLs), system, turns (earlier messages) and stop may be missing.
 * Throws an Error whose message is the server's; its `status` is the HTTP status.
 */
export async function* generate(wish, signal) {
  const response = await fetch(wish.chat ? "v1/chat/completions" : "generate_stream", {
    method: "POST",
    signal,
    headers: {
      "Content-Type": "application/json",
      ...(wish.apiKey && { Authorization: `Bearer ${wish.apiKey}` }),
    },
    body: JSON.stringify(requestBody(wish)),
  });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message ?? event.error);
    yield* wish.chat ? chatTokens(event) : plainTokens(event);
  }
}

/** The body of the request; a chat's has `stream` and `logprobs`, which code for programs may leave out. */
export function requestBody(wish) {
  return wish.chat ? { ...chatRequest(wish), stream: true, logprobs: true } : plainRequest(wish);
}

function plainRequest(wish) {
  const parameters = { max_new_tokens: wish.maxNewTokens, seed: wish.seed };
  if (wish.stop) parameters.stop = [wish.stop];
  if (wish.adapter) parameters.adapter_id = wish.adapter;
  if (wish.temperature > 0) Object.assign(parameters, { do_sample: true, temperature: wish.temperature });
  if (wish.temperature > 0 && wish.topP < 1) parameters.top_p = wish.topP;
  return { inputs: (wish.images ?? []).map((url) => `![](${url})`).join("") + wish.prompt, parameters };
}

/** The content of the user's message: a text, or parts if there are images. */
export function contentOf(wish) {
  if (!wish.images?.length) return wish.prompt;
  const parts = wish.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text: wish.prompt }];
}

export function chatRequest(wish) {
  return {
    model: wish.adapter || "tgi",
    messages: [
      ...(wish.system ? [{ role: "system", content: wish.system }] : []),
      ...(wish.turns ?? []),
      { role: "user", content: contentOf(wish) },
    ],
    max_tokens: wish.maxNewTokens,
    temperature: wish.temperature,
    ...(wish.topP < 1 && { top_p: wish.topP }),
    seed: wish.seed,
    ...(wish.stop && { stop: [wish.stop] }),
  };
}

function* plainTokens(event) {
  const { text, special, logprob, drafted = false } = event.token;
  yield { text: special ? "" : text, logprob, drafted };
}

function* chatTokens(event) {
  const choice = event.choices?.[0];
  if (!choice) return;
  const { logprob = null, drafted = false } = choice.logprobs?.content?.[0] ?? {};
  const text = choice.delta?.content ?? "";
  if (text || logprob !== null) yield { text, logprob, drafted };
}

const ADVICE = {
  401: "Enter a key of this server in the field API key, and try again.",
  413: "Shorten the prompt, or ask for fewer new tokens.",
  429: "The server is busy: try again in a moment.",
  503: "The server is loading or stopping: try again in a moment.",
};

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.error ?? message;
  } catch {
    // The status line has to do.
  }
  const advice = ADVICE[response.status];
  return Object.assign(new Error(advice ? `${message}\n${advice}` : message), { status: response.status });
}

/** The data of server-sent events, as their lines come in. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
