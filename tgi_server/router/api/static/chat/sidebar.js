// The list of conversations: search, import and export.

import { make, notify, saveFile } from "../core/dom.js";
import { asJson, fromJson } from "./transfer.js";

const SEARCH_AFTER_MS = 150;

export class Sidebar {
  /**
   * elements: {panel, list, search, importFile, importButton, exportButton, backdrop}. actions: {open(id), remove(id)}.
   */
  constructor(elements, storage, actions) {
    Object.assign(this, elements, { storage, actions });
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), SEARCH_AFTER_MS);
    });
    this.importButton.addEventListener("click", () => this.importFile.click());
    this.importFile.addEventListener("change", () => this.take());
    this.exportButton.addEventListener("click", () => this.exportAll());
    this.backdrop.addEventListener("click", () => this.toggle(false));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.narrow = matchMedia("(max-width: 56rem)");
    this.toggle(!this.narrow.matches);
    this.narrow.addEventListener("change", () => this.toggle(!this.narrow.matches));
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  /** Opens or closes the panel; on narrow screens it covers the rest, which then takes no keys. */
  toggle(open = !this.isOpen) {
    const covers = open && this.narrow.matches;
    document.body.classList.toggle("sidebar-open", open);
    this.panel.inert = !open;
    document.getElementById("page").inert = covers;
    this.backdrop.hidden = !covers;
    document.getElementById("toggle-sidebar").setAttribute("aria-expanded", String(open));
  }

  closeIfNarrow() {
    if (this.narrow.matches) this.toggle(false);
  }

  /** Shows the conversations that the search finds. current: id of the one that is open. */
  async refresh(current = this.current) {
    this.current = current;
    const found = await this.storage.search(this.search.value);
    const items = found.map(({ id, title, updated }) => {
      const open = () => {
        this.closeIfNarrow();
        this.actions.open(id);
      };
      const name = title || "New chat";
      const button = make("button", { type: "button", title: new Date(updated).toLocaleString(), data: { id }, on: { click: open } }, name);
      if (id === current) button.setAttribute("aria-current", "page");
      return make("li", {}, button);
    });
    const none = this.search.value ? "Nothing has these words." : "No conversations yet.";
    this.list.replaceChildren(...(items.length ? items : [make("li", { className: "hint" }, none)]));
  }

  /** Arrow keys walk along the list, Delete removes. */
  key(event) {
    const buttons = [...this.list.querySelectorAll("button")];
    const index = buttons.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      buttons[index + step]?.focus();
    }
    if (event.key === "Delete" && index >= 0) this.actions.remove(buttons[index].dataset.id);
  }

  async exportAll() {
    const day = new Date().toISOString().slice(0, 10);
    saveFile(`conversations-${day}.json`, asJson(await this.storage.all()), "application/json");
  }

  /** Imports a file. Of a conversation that is there already, the newer one stays. */
  async take() {
    const [file] = this.importFile.files;
    this.importFile.value = "";
    if (!file) return;
    try {
      const records = fromJson(await file.text());
      for (const record of records) {
        const known = await this.storage.get(record.id);
        if (!known || known.updated < record.updated) await this.storage.put(record);
      }
      notify(`${records.length} conversations imported`);
    } catch (error) {
      notify(error.message);
    }
    await this.refresh();
  }
}
