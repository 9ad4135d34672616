// The images that are sent with the next prompt: dropped, pasted, or chosen as files.

export class Images {
  /** form: images may be dropped there, and pasted. list: shows them. file: an input for files. changed: is called. */
  constructor(form, list, file, changed) {
    this.urls = [];
    this.list = list;
    this.changed = changed;
    this.accepted = false;
    form.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    form.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
    file.addEventListener("change", async () => {
      await this.add(file.files);
      file.value = "";
    });
    for (const name of ["dragenter", "dragover"]) form.addEventListener(name, (event) => this.hover(event, form));
    for (const name of ["dragleave", "drop"]) form.addEventListener(name, () => form.classList.remove("dropping"));
  }

  /** Lets a file be dropped rather than opened by the browser. */
  hover(event, form) {
    if (!this.accepted || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    form.classList.add("dropping");
  }

  /** Takes the images of a paste or drop; text goes where it always goes. */
  async take(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (!this.accepted || !files.length) return;
    event.preventDefault();
    await this.add(files);
  }

  async add(files) {
    for (const file of files) this.urls.push(await dataUrl(file));
    this.show();
  }

  /** Returns the images, and forgets them. */
  sent() {
    const urls = this.urls;
    this.urls = [];
    this.show();
    return urls;
  }

  show() {
    const items = this.urls.map((url, index) => {
      const item = document.createElement("li");
      const remove = document.createElement("button");
      remove.type = "button";
      remove.className = "plain";
      remove.textContent = "\u00d7";
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      remove.addEventListener("click", () => {
        this.urls.splice(index, 1);
        this.show();
      });
      item.append(picture(url, `Image ${index + 1}`), remove);
      return item;
    });
    this.list.replaceChildren(...items);
    this.changed();
  }
}

/** Returns an element that shows an image. */
export function picture(url, name) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = name;
  return image;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
