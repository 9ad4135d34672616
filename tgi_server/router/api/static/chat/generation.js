// One answer while it is generated: reads the stream into a message.

import { answer } from "./stream.js";

const SAVE_EVERY_MS = 1000;

export class Generation {
  /**
   * conversation: that the message belongs to. message: the assistant's, to which text is added. changed: called with
   * the message after each piece. save: called now and then, and at the end.
   */
  constructor(conversation, message, changed, save) {
    Object.assign(this, { conversation, message, changed, save });
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  /** Runs to the end, whatever it is: the message says which. makeRequest: returns the request, may throw. */
  async run(makeRequest) {
    const { message } = this;
    Object.assign(message, { end: null, error: null });
    const started = performance.now();
    const statistics = (message.statistics = { first: null, seconds: 0, tokens: 0 });
    let saved = started;
    try {
      for await (const piece of answer(makeRequest(), this.abort.signal)) {
        statistics.first ??= (performance.now() - started) / 1000;
        statistics.seconds = (performance.now() - started) / 1000;
        this.take(piece, statistics);
        this.changed(message);
        if (performance.now() - saved > SAVE_EVERY_MS) {
          saved = performance.now();
          this.save();
        }
      }
      message.end ??= "stop";
    } catch (error) {
      if (error.name === "AbortError") message.end = "stopped";
      else {
        message.end = "error";
        message.error = { message: error.message, status: error.status ?? 0, advice: error.advice ?? "" };
      }
    }
    this.conversation.updated = Date.now();
    this.save();
    this.changed(message);
  }

  take({ text, thoughts, tokens, call, usage, end }, statistics) {
    const { message } = this;
    if (text) message.text += text;
    if (thoughts) message.thoughts = (message.thoughts ?? "") + thoughts;
    if (text || thoughts) statistics.tokens += 1;
    if (tokens?.length) {
      const list = thoughts ? "thoughtTokens" : "tokens";
      (message[list] ??= []).push(...tokens);
    }
    if (call) {
      message.calls ??= [];
      const known = (message.calls[call.index] ??= { id: call.id, name: call.name, arguments: "" });
      known.arguments += call.arguments;
    }
    if (usage) Object.assign(statistics, usage);
    if (end) message.end = end;
  }
}
