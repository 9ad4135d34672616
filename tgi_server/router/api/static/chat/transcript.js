// The messages of the conversation that is shown, and the place to which they are scrolled.

import { MessageView } from "./message_view.js";

const NEAR_PIXELS = 80;
const SHOW_EVERY_MS = 40;

export class Transcript {
  /** log: the element that scrolls. list: holds the messages. jump: a button that goes to the end. */
  constructor(log, list, jump, actions) {
    Object.assign(this, { log, list, jump, actions });
    this.views = new Map();
    this.follows = true;
    this.due = new Set();
    log.addEventListener("scroll", () => {
      this.follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PIXELS;
      jump.hidden = this.follows;
    });
    jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(log);
  }

  /** Shows the messages of a path. contextOf(message): see MessageView.update. */
  show(messages, contextOf) {
    this.contextOf = contextOf;
    const kept = new Map();
    for (const message of messages) {
      const view = this.views.get(message.id);
      if (view?.message === message) {
        view.update(contextOf(message));
        kept.set(message.id, view);
      } else kept.set(message.id, new MessageView(message, this.actions, contextOf(message)));
    }
    for (const [id, view] of this.views) if (kept.get(id) !== view) view.element.remove();
    this.views = kept;
    [...kept.values()].forEach(({ element }, index) => {
      if (this.list.children[index] !== element) this.list.insertBefore(element, this.list.children[index] ?? null);
    });
    this.follow();
  }

  /** Shows a message that has changed, soon: not after every token. */
  changed(message) {
    this.due.add(message);
    this.timer ??= setTimeout(() => {
      this.timer = null;
      for (const each of this.due) this.views.get(each.id)?.update(this.contextOf(each));
      this.due.clear();
      this.follow();
    }, SHOW_EVERY_MS);
  }

  follow() {
    if (this.follows) this.toEnd();
  }

  toEnd() {
    this.follows = true;
    this.jump.hidden = true;
    this.log.scrollTop = this.log.scrollHeight;
  }

  view(message) {
    return this.views.get(message.id);
  }
}
