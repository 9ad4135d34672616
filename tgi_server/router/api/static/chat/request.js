// The body of a request, from the options and messages of a conversation.

import { ServerError } from "../core/server.js";

const BASE_MODEL = "tgi";
// Names of options in the chat's and in the plain request, where they have the same meaning.
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"];

/** Returns {path, body} of a request for the message after `messages`; a last answer among them is continued. */
export function requestFor(options, messages) {
  return options.plain
    ? { path: "generate_stream", body: plainBody(options, messages) }
    : { path: "v1/chat/completions", body: chatBody(options, messages) };
}

/** Returns the body without what only a stream with probabilities needs: code for programs leaves it out. */
export function essential(body) {
  const { stream, stream_options, logprobs, top_logprobs, ...rest } = body;
  return rest;
}

function chatBody(options, messages) {
  const continued = messages.at(-1)?.role === "assistant";
  const schema = parsed(options.schema, "JSON schema");
  const tools = parsed(options.tools, "list of tools");
  return defined({
    model: options.adapter || BASE_MODEL,
    messages: [
      ...(options.system?.trim() ? [{ role: "system", content: options.system.trim() }] : []),
      ...merged(messages.filter(says)).map(asSent),
    ],
    max_tokens: options.max_tokens,
    ...sampling(options),
    frequency_penalty: options.frequency_penalty,
    reasoning_effort: options.reasoning_effort || undefined,
    stop: stops(options),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
    tools: tools && [tools].flat().map((tool) => (tool.function ? tool : { type: "function", function: tool })),
    continue_final_message: continued || undefined,
    stream: true,
    stream_options: { include_usage: true },
    ...(options.probabilities && { logprobs: true, top_logprobs: 5 }),
  });
}

function plainBody(options, messages) {
  const prompt = messages.findLast(({ role }) => role === "user");
  const begun = messages.at(-1).role === "assistant" ? messages.at(-1).text : "";
  const samples = (options.temperature ?? 0) > 0;
  const schema = parsed(options.schema, "JSON schema");
  return {
    inputs: (prompt.images ?? []).map((url) => `![](${url})`).join("") + prompt.text + begun,
    parameters: defined({
      max_new_tokens: options.max_tokens,
      ...(samples ? { do_sample: true, ...sampling(options) } : { seed: options.seed }),
      stop: stops(options),
      adapter_id: options.adapter || undefined,
      grammar: schema && { type: "json", value: schema },
      top_n_tokens: options.probabilities ? 5 : undefined,
    }),
  };
}

const sampling = (options) => Object.fromEntries(SAMPLING.map((name) => [name, options[name]]));
const stops = (options) => (options.stop ? [options.stop] : undefined);
const says = (message) => message.role !== "assistant" || message.text || message.calls?.length;
const defined = (object) => Object.fromEntries(Object.entries(object).filter(([, value]) => value !== undefined));

/** Joins messages of the user that no answer parts, as after an error: templates want turns. */
function merged(messages) {
  const joined = [];
  for (const message of messages) {
    const last = joined.at(-1);
    if (message.role === "user" && last?.role === "user") {
      const images = [...(last.images ?? []), ...(message.images ?? [])];
      joined[joined.length - 1] = { ...last, text: `${last.text}\n\n${message.text}`, images };
    } else joined.push(message);
  }
  return joined;
}

function asSent({ role, text, images, thoughts, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content: text };
  if (role === "assistant") {
    return {
      role,
      content: text || (calls?.length ? null : ""),
      ...(thoughts && { reasoning_content: thoughts }),
      ...(calls?.length && {
        tool_calls: calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        })),
      }),
    };
  }
  if (!images?.length) return { role, content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

function parsed(text, name) {
  if (!text?.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ServerError(`The ${name} is not JSON: ${error.message}.`, 0, "Correct it in the options.");
  }
}
