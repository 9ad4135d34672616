// Elements of the page.

/** Returns the element of the page with this id. */
export const element = (id) => document.getElementById(id);

/**
 * Returns a new element. properties: `on` has listeners by their events, `data` its data attributes; names with a dash
 * and `role` are attributes, all others are properties. children: elements and texts; null and false are left out.
 */
export function make(tag, properties = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) created.addEventListener(event, listener);
    else if (name === "data") Object.assign(created.dataset, value);
    else if (name.includes("-") || name === "role") created.setAttribute(name, value);
    else created[name] = value;
  }
  created.append(...children.filter((child) => child !== null && child !== false && child !== undefined));
  return created;
}

/** Returns a number as people read it. */
export const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

/** Returns an id that no other object has. `crypto.randomUUID` is missing on pages that are served over plain HTTP. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(10))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Has screen readers say something. */
export function announce(text) {
  element("announcement").textContent = text;
}

/** Shows a notice for some seconds. action: {label, run}, such as to undo what the notice says. */
export function notify(text, action) {
  const notice = element("notice");
  clearTimeout(notify.timer);
  const hide = () => (notice.hidden = true);
  const button = action && make("button", { type: "button", on: { click: () => (hide(), action.run()) } }, action.label);
  notice.replaceChildren(text, ...(button ? [button] : []));
  notice.hidden = false;
  notify.timer = setTimeout(hide, action ? 10_000 : 4_000);
}

/** Copies a text. Pages that are served over plain HTTP have no clipboard, but may copy what is selected. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const focused = document.activeElement;
    const field = make("textarea", { value: text, className: "unseen" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    focused?.focus();
  }
  announce("Copied");
}

/** Saves a text as a file. */
export function saveFile(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
