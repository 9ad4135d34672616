// Images for the next message: dropped, pasted, or chosen as files.

import { announce, make, notify } from "../core/dom.js";

// Larger ones are made smaller: models read fewer pixels, and conversations are kept in the browser.
const MOST_PIXELS = 2048;

export class Images {
  /** area: images may be dropped and pasted there. list: shows them. file: an input for files. changed: is called. */
  constructor(area, list, file, changed) {
    Object.assign(this, { area, list, changed });
    this.urls = [];
    this.accepted = false;
    area.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    area.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
    file.addEventListener("change", async () => {
      await this.add(file.files);
      file.value = "";
    });
    for (const name of ["dragenter", "dragover"]) area.addEventListener(name, (event) => this.hover(event));
    for (const name of ["dragleave", "drop"]) area.addEventListener(name, () => area.classList.remove("dropping"));
  }

  /** Lets a file be dropped rather than opened by the browser. */
  hover(event) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    this.area.classList.toggle("dropping", this.accepted);
  }

  /** Takes the images of a paste or drop; text goes where it always goes. */
  async take(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    if (this.accepted) await this.add(files);
    else notify("This model reads text only.");
  }

  async add(files) {
    for (const file of files) {
      try {
        this.urls.push(await readImage(file));
      } catch {
        notify(`${file.name} is not an image that this browser can read.`);
      }
    }
    announce(`${this.urls.length} images with the next message`);
    this.show();
  }

  /** Returns the images, and has none any more. */
  taken() {
    const urls = this.urls;
    this.urls = [];
    this.show();
    return urls;
  }

  show() {
    const items = this.urls.map((url, index) => {
      const remove = () => {
        this.urls.splice(index, 1);
        this.show();
      };
      const name = `Remove image ${index + 1}`;
      return make(
        "li",
        {},
        make("img", { src: url, alt: `Image ${index + 1}` }),
        make("button", { type: "button", title: name, "aria-label": name, on: { click: remove } }, "\u00d7"),
      );
    });
    this.list.replaceChildren(...items);
    this.changed();
  }
}

/** Returns an image as a data URL: the file's own bytes unless it is too large. */
async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = MOST_PIXELS / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1) return dataUrl(file);
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
