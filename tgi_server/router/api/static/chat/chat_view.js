// The chat: the conversation that is open, its transcript and composer, and the answers that are generated.

import { announce, element, notify, saveFile } from "../core/dom.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { Generation } from "./generation.js";
import { ModelMenu } from "./model_menu.js";
import { Options, remarkable } from "./options.js";
import { requestFor } from "./request.js";
import { Sidebar } from "./sidebar.js";
import { asJson, asMarkdown } from "./transfer.js";
import { Transcript } from "./transcript.js";
import { welcome } from "./welcome.js";

export class ChatView {
  /** info: the server's info. storage: see storage.js. openOptions: shows the options. */
  constructor(info, storage, openOptions) {
    this.storage = storage;
    this.generations = new Map();
    this.options = new Options(element("options-form"), (options) => this.setOptions(options));
    const actions = {
      edit: (message, text) => this.edit(message, text),
      regenerate: (message) => this.answer(message.parent),
      retry: (message) => this.generate(message),
      resume: (message) => this.generate(message),
      show: (message) => this.showBranch(message),
      result: (message, results) => this.giveResults(message, results),
      openOptions,
    };
    this.transcript = new Transcript(element("log"), element("messages"), element("jump"), actions);
    this.composer = new Composer(element("composer"), {
      send: (text, images) => this.send(text, images),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
    });
    this.models = new ModelMenu(element("adapter"), info, () => this.showAll());
    element("adapter").hidden = !this.models.several;
    element("model").hidden = this.models.several;
    const parts = { panel: "sidebar", list: "conversations", search: "search", backdrop: "backdrop" };
    const controls = { importFile: "import-file", importButton: "import", exportButton: "export-all" };
    const elements = Object.fromEntries(Object.entries({ ...parts, ...controls }).map(([name, id]) => [name, element(id)]));
    this.sidebar = new Sidebar(elements, storage, { open: (id) => this.open(id), remove: (id) => this.remove(id) });
    this.listen(openOptions);
  }

  listen(openOptions) {
    element("toggle-sidebar").addEventListener("click", () => this.sidebar.toggle());
    for (const id of ["new-chat", "new-chat-small"]) element(id).addEventListener("click", () => this.begin());
    element("active-options").addEventListener("click", openOptions);
    element("export-markdown").addEventListener("click", () => this.export("md", asMarkdown, "text/markdown"));
    element("export-json").addEventListener("click", () => this.export("json", (one) => asJson([one.record]), "application/json"));
    element("remove").addEventListener("click", () => this.remove(this.conversation.id));
    element("rename").addEventListener("click", () => this.rename());
    element("adapter").addEventListener("change", (event) => this.setOptions(this.options.set("adapter", event.target.value)));
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("keydown", (event) => this.key(event));
  }

  /** Opens the conversation of the address, or begins one. */
  async start() {
    if (!this.storage.keeps) notify("This browser refuses to keep conversations: they are gone when the page is closed.");
    await this.open(location.hash.slice(1));
    this.models.start();
  }

  key(event) {
    if (document.querySelector("dialog[open]")) return;
    const control = event.ctrlKey || event.metaKey;
    if (event.key === "Escape" && this.sidebar.isOpen && this.sidebar.narrow.matches) this.sidebar.toggle(false);
    else if (event.key === "Escape") this.stop();
    else if (control && event.shiftKey && event.key.toLowerCase() === "o") this.begin();
    else if (control && !event.shiftKey && event.key.toLowerCase() === "k") {
      this.sidebar.toggle(true);
      element("search").focus();
    } else return;
    event.preventDefault();
  }

  begin() {
    this.sidebar.closeIfNarrow();
    this.present(Conversation.begin(Options.kept()));
    history.replaceState(null, "", location.pathname + location.search);
    this.composer.focus();
  }

  async open(id) {
    if (this.conversation?.id === id) return;
    const running = this.generations.get(id)?.conversation;
    const record = running ?? (id && (await this.storage.get(id)));
    if (!record) this.begin();
    else this.present(running ?? new Conversation(record));
  }

  present(conversation) {
    this.conversation = conversation;
    if (conversation.messages.length) location.hash = conversation.id;
    conversation.options = { ...conversation.options, adapter: this.models.choose(conversation.options.adapter) };
    this.options.show(conversation.options);
    this.transcript.follows = true;
    this.showAll();
    this.sidebar.refresh(conversation.id);
  }

  showAll() {
    const { conversation } = this;
    const info = this.models.chosenInfo;
    const path = conversation.path();
    const generation = this.generations.get(conversation.id);
    this.transcript.show(path, (message) => ({
      running: generation?.message === message && this.generations.get(conversation.id) === generation,
      siblings: conversation.siblings(message),
      last: message.id === conversation.leaf,
      drafts: info.speculate > 0,
      waiting: this.models.waiting,
      probabilities: Boolean(conversation.options.probabilities),
    }));
    this.composer.run(Boolean(generation));
    this.composer.readsImages = info.reads_images;
    welcome(element("welcome"), info, path.length > 0, (text) => this.send(text, []));
    const marks = remarkable(conversation.options);
    element("active-options").textContent = marks.join(" \u00b7 ");
    element("active-options").hidden = !marks.length;
    for (const id of ["export-markdown", "export-json", "remove", "rename"]) element(id).disabled = !path.length;
    element("title").textContent = conversation.title;
  }

  setOptions(options) {
    this.conversation.options = { ...options };
    if (this.conversation.messages.length) this.save(this.conversation);
    this.showAll();
  }

  /** Sends a message. Returns false if an answer is being generated. */
  send(text, images) {
    if (this.generations.has(this.conversation.id)) return false;
    const message = this.conversation.add(this.conversation.leaf, { role: "user", text, ...(images.length && { images }) });
    this.transcript.follows = true;
    this.answer(message.id);
    return true;
  }

  /** Generates an answer to the message with this id, as a branch of its own. */
  answer(id) {
    this.generate(this.conversation.add(id, { role: "assistant", end: null }));
  }

  /** Generates a message, or continues it. */
  async generate(message) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    const changed = (each) => this.conversation === conversation && this.transcript.changed(each);
    const generation = new Generation(conversation, message, changed, () => this.save(conversation));
    this.generations.set(conversation.id, generation);
    location.hash = conversation.id;
    announce("The model answers.");
    this.showAll();
    await this.save(conversation);
    this.sidebar.refresh(this.conversation.id);
    await generation.run(() => {
      const path = conversation.path(message.id);
      return requestFor(conversation.options, message.text ? path : path.slice(0, -1));
    });
    this.generations.delete(conversation.id);
    announce(message.end === "error" ? "" : "The answer is there.");
    if (this.conversation === conversation) this.showAll();
  }

  stop() {
    this.generations.get(this.conversation.id)?.stop();
  }

  edit(message, text) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    if (message.role === "user") {
      const { images } = message;
      this.answer(conversation.add(message.parent, { role: "user", text: text.trim(), ...(images && { images }) }).id);
      return;
    }
    const { thoughts, calls } = message;
    conversation.add(message.parent, { role: "assistant", text, end: "stop", thoughts, calls });
    this.save(conversation);
    this.showAll();
  }

  editLast() {
    const last = this.conversation.path().findLast(({ role }) => role === "user");
    if (last && !this.generations.has(this.conversation.id)) this.transcript.view(last).edit();
  }

  giveResults(message, results) {
    let parent = message.id;
    for (const { callId, text } of results) parent = this.conversation.add(parent, { role: "tool", callId, text }).id;
    this.answer(parent);
  }

  showBranch(message) {
    this.conversation.show(message);
    this.save(this.conversation);
    this.showAll();
  }

  async save(conversation) {
    await this.storage.put(conversation.record);
  }

  async rename() {
    const title = prompt("Name of this conversation", this.conversation.title)?.trim();
    if (!title) return;
    this.conversation.title = title;
    await this.save(this.conversation);
    this.showAll();
    this.sidebar.refresh();
  }

  async remove(id) {
    this.generations.get(id)?.stop();
    const record = await this.storage.get(id);
    if (!record) return;
    await this.storage.remove(id);
    const undo = async () => {
      await this.storage.put(record);
      this.open(id);
      this.sidebar.refresh();
    };
    if (this.conversation.id === id) this.begin();
    else this.sidebar.refresh();
    notify(`Deleted: ${record.title}`, { label: "Undo", run: undo });
  }

  export(ending, write, type) {
    const name = this.conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50).replace(/^-|-$/g, "") || "chat";
    saveFile(`${name}.${ending}`, write(this.conversation), type);
  }

  /** Returns {path, body} of the request for the message in the composer, else for the last one that was sent. */
  currentRequest() {
    const { conversation, composer } = this;
    const path = conversation.path();
    const text = composer.text.trim();
    const written = text || composer.images.urls.length;
    const asked = path.slice(0, path.findLastIndex(({ role }) => role !== "assistant") + 1);
    const next = { role: "user", text: text || "How do I hang a picture?", images: composer.images.urls };
    return requestFor(conversation.options, written || !asked.length ? [...path, next] : asked);
  }
}
