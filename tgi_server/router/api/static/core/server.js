// Requests to the server, and what to do when it refuses them.

const KEY = "oatmill-api-key";
const TOO_LONG = "Start a new chat, shorten the message, or ask for fewer tokens.";
const ADVICE = {
  401: "Enter a key of this server.",
  403: "Open the page by a name of the server that --allowed-hosts has.",
  413: TOO_LONG,
  429: "The server has too much to do. Try again in a moment.",
  503: "The server is loading or stopping. Try again in a moment.",
  504: "The request took too long. Try again, or ask for a shorter answer.",
};
const ADVICE_BY_CODE = {
  context_length_exceeded: TOO_LONG,
  model_unavailable: "Choose another model, or try again later.",
};
const ADVICE_BY_TYPE = {
  template_error: "Send it as plain text (Options, Send as), or change the messages.",
  tool_error: "Change the tools in the options.",
};
const UNREACHABLE = "Check that it is running, then try again.";

/** An error of the server. status: HTTP status, 0 if there was no response. advice: what the user can do, or "". */
export class ServerError extends Error {
  constructor(message, status = 0, advice = "") {
    super(message);
    Object.assign(this, { status, advice });
  }
}

/** The API key, which the browser keeps until its tab is closed. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key.trim()),
};

/** Posts JSON and returns the response. Throws ServerError, and an AbortError if the signal aborts it. */
export async function post(path, body, signal) {
  const key = apiKey.get();
  const response = await request(path, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
  return response;
}

/** Returns the JSON of a GET. Throws ServerError. */
export async function get(path) {
  const response = await request(path, {});
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Returns the progress that an error of a loading server tells, {percent, stage}; null for other errors. */
export function loadingProgress(error) {
  const [, percent, stage] = /^Loading model, (\d+) %: (.*)$/s.exec(error.message) ?? [];
  return error.status === 503 && percent ? { percent: Number(percent), stage } : null;
}

async function request(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.", 0, UNREACHABLE);
  }
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  let type = "";
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? body.error ?? message;
    type = body.error_type;
    code = body.error?.code;
  } catch {
    // The status line has to do.
  }
  const advice = ADVICE_BY_TYPE[type] ?? ADVICE_BY_CODE[code] ?? ADVICE[response.status] ?? "";
  return new ServerError(message, response.status, advice);
}

/** Yields the data of a response's server-sent events, as their lines come in. Throws ServerError if it breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke off.", 0, UNREACHABLE);
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
