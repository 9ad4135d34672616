// Conversations in the browser's database. Where that is refused they live as long as the page.

const NAME = "oatmill";
const STORE = "conversations";

export class Storage {
  /** changed: called when another tab has changed something. */
  static async open(changed) {
    const storage = new Storage();
    try {
      storage.database = await opened();
    } catch {
      storage.memory = new Map();
    }
    storage.channel = new BroadcastChannel(NAME);
    storage.channel.addEventListener("message", changed);
    return storage;
  }

  get keeps() {
    return !this.memory;
  }

  async put(record) {
    if (this.memory) this.memory.set(record.id, structuredClone(record));
    else await this.done("readwrite", (store) => store.put(record));
    this.channel.postMessage(record.id);
  }

  async get(id) {
    return this.memory ? structuredClone(this.memory.get(id)) : this.done("readonly", (store) => store.get(id));
  }

  async remove(id) {
    if (this.memory) this.memory.delete(id);
    else await this.done("readwrite", (store) => store.delete(id));
    this.channel.postMessage(id);
  }

  async all() {
    return this.memory ? structuredClone([...this.memory.values()]) : this.done("readonly", (store) => store.getAll());
  }

  /** Returns {id, title, updated} of the conversations that have all words of a query, the newest first. */
  async search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (text) => words.every((word) => text.includes(word));
    return (await this.all())
      .filter((record) => !words.length || has(textOf(record)))
      .sort((one, other) => other.updated - one.updated)
      .map(({ id, title, updated }) => ({ id, title, updated }));
  }

  done(mode, act) {
    return finished(act(this.database.transaction(STORE, mode).objectStore(STORE)));
  }
}

function textOf({ title, messages }) {
  return [title, ...messages.map(({ text }) => text)].join("\n").toLowerCase();
}

function opened() {
  const request = indexedDB.open(NAME, 1);
  request.addEventListener("upgradeneeded", () => request.result.createObjectStore(STORE, { keyPath: "id" }));
  return finished(request);
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}
