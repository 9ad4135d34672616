// The menu of models and adapters. On a server of several models it shows their states.

import { get } from "../core/server.js";

const EVERY_MS = 1000;
const WAITING = {
  asleep: "is asleep, and wakes as soon as there is memory for it",
  loading: "is loading",
  failed: "has failed, and is loaded again",
};

export class ModelMenu {
  /**
   * select: the element that is filled. info: the server's info. changed: called when the state or the info of a model
   * has changed.
   */
  constructor(select, info, changed) {
    Object.assign(this, { select, info, changed });
    this.listed = new Map();
    this.infos = new Map();
    const models = info.models ?? [""]; // the only model needs no name in requests
    select.append(...[...models, ...info.adapters.map(({ id }) => id)].map((name) => new Option(name || info.model_id, name)));
  }

  /** Keeps the states up to date, if there are several models. */
  start() {
    if (!this.info.models) return;
    this.poll();
    setInterval(() => document.hidden || this.poll(), EVERY_MS);
  }

  get several() {
    return this.select.options.length > 1;
  }

  /** Chooses a model or adapter; the default one for a name that this server does not have. Returns the name. */
  choose(name) {
    const names = [...this.select.options].map(({ value }) => value);
    return (this.select.value = names.includes(name) ? name : names[0]);
  }

  /** Returns the /info of the chosen model if it is known, otherwise that of the default one. */
  get chosenInfo() {
    return this.infos.get(this.select.value) ?? this.info;
  }

  /** Returns why the chosen model may not answer yet; "" for a model that is awake. */
  get waiting() {
    const text = WAITING[this.listed.get(this.select.value)?.state];
    return text ? `${this.select.value} ${text}` : "";
  }

  async poll() {
    const models = (await get("v1/models").catch(() => null))?.data ?? [];
    let changed = false;
    for (const model of models) {
      changed ||= this.listed.get(model.id)?.state !== model.state;
      this.listed.set(model.id, model);
    }
    for (const option of this.select.options) {
      const { state = "awake", reason = "" } = this.listed.get(option.value) ?? {};
      const text = state === "awake" ? option.value : `${option.value} (${state})`;
      if (option.text !== text) option.text = text; // writing it closes the menu
      option.title = reason;
    }
    const chosen = this.select.value;
    if (this.listed.get(chosen)?.state === "awake" && !this.infos.has(chosen)) {
      const info = await get(`info?model=${encodeURIComponent(chosen)}`).catch(() => null);
      if (info) this.infos.set(chosen, info);
      changed ||= Boolean(info);
    }
    if (changed) this.changed();
  }
}
