// An answer, piece by piece, from either of the server's streams.

import { events, post, ServerError } from "../core/server.js";

/**
 * Yields pieces: {text}, {thoughts}, {call: {index, id, name, arguments}}, {usage: {prompt, cached, tokens}} and
 * {end}, the server's reason for the end. Pieces of text may have `tokens`: [{text, logprob, drafted, others}], where
 * `others` are the likeliest tokens at that place, as [text, logprob]. Throws ServerError.
 */
export async function* answer({ path, body }, signal) {
  const read = path === "generate_stream" ? plainPieces : chatPieces;
  for await (const data of events(await post(path, body, signal))) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message ?? event.error, 0, "Try again.");
    yield* read(event);
  }
}

function* plainPieces({ token, top_tokens = [], details }) {
  const text = token.special ? "" : token.text;
  const others = top_tokens.map((other) => [other.text, other.logprob]);
  yield { text, tokens: [{ text, logprob: token.logprob, drafted: token.drafted ?? false, others }] };
  if (!details) return;
  yield { usage: { prompt: details.input_length, tokens: details.generated_tokens } };
  const ended = ["eos_token", "stop_sequence"].includes(details.finish_reason);
  yield { end: ended ? "stop" : details.finish_reason };
}

function* chatPieces({ choices, usage }) {
  if (usage) {
    yield {
      usage: {
        prompt: usage.prompt_tokens,
        tokens: usage.completion_tokens,
        cached: usage.prompt_tokens_details?.cached_tokens,
      },
    };
  }
  const choice = choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: thoughts, tool_calls: calls = [] } = choice.delta ?? {};
  const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, drafted = false, top_logprobs = [] }) => ({
    text: token,
    logprob,
    drafted,
    others: top_logprobs.map((other) => [other.token, other.logprob]),
  }));
  if (thoughts) yield { thoughts, tokens };
  else if (content || (tokens.length && !calls.length)) yield { text: content ?? "", tokens };
  for (const { index, id, function: called, custom } of calls) {
    const { name, arguments: written, input } = called ?? custom ?? {};
    yield { call: { index, id, name, arguments: written ?? input ?? "" } };
  }
  if (choice.finish_reason) yield { end: choice.finish_reason };
}
