// A conversation: a tree of messages, of which one path is shown. Editing and regenerating add branches.

import { newId } from "../core/dom.js";

const TITLE_LENGTH = 60;

/**
 * record: {id, title, created, updated, options, messages, leaf}, as it is stored and exported.
 *
 * A message: {id, parent, role: "user" | "assistant" | "tool", text}. A user's may have `images` (data URLs), a tool's
 * has `callId`. An assistant's may have `thoughts`, `calls` ([{id, name, arguments}]), `tokens` (see stream.js),
 * `statistics`, `error` ({message, status, advice}) and, once it has ended, `end`: the server's finish reason, "error",
 * or "stopped" (by the user).
 */
export class Conversation {
  constructor(record) {
    Object.assign(this, record);
  }

  static begin(options) {
    const now = Date.now();
    return new Conversation({ id: newId(), title: "", created: now, updated: now, options, messages: [], leaf: null });
  }

  get record() {
    return { ...this };
  }

  message(id) {
    return this.messages.find((message) => message.id === id) ?? null;
  }

  /** Returns the messages that are shown, or those up to the message with the id `end`. */
  path(end = this.leaf) {
    const path = [];
    for (let message = this.message(end); message; message = this.message(message.parent)) path.unshift(message);
    return path;
  }

  /** Adds a message below another one and shows it. Returns it. */
  add(parent, fields) {
    const message = { id: newId(), parent, text: "", ...fields };
    this.messages.push(message);
    this.leaf = message.id;
    if (!this.title && message.role === "user") this.title = titleOf(message.text);
    this.updated = Date.now();
    return message;
  }

  /** Returns the messages that stand at the same place, in the order in which they were made. */
  siblings(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  /** Shows a branch, down to its newest message. */
  show(message) {
    let newest = message;
    for (;;) {
      const below = this.messages.filter((other) => other.parent === newest.id).at(-1);
      if (!below) break;
      newest = below;
    }
    this.leaf = newest.id;
  }
}

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}\u2026` : line || "Image";
}
