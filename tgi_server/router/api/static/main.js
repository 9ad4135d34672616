// The page: waits for the server, then shows what fits its models.

import { ChatView } from "./chat/chat_view.js";
import { Storage } from "./chat/storage.js";
import { element, make } from "./core/dom.js";
import { drawIcons } from "./core/icons.js";
import { showCode } from "./views/code.js";
import { showLoad } from "./views/load.js";
import { generates, whenReady } from "./views/loading.js";
import { labelsView, rankingView } from "./views/ranking.js";
import { similarityView } from "./views/similarity.js";

/** Has buttons with `data-opens` open their dialogs, which a click beside them closes. */
function connectDialogs() {
  for (const button of document.querySelectorAll("[data-opens]")) {
    button.addEventListener("click", () => {
      element("menu").hidePopover?.();
      element(button.dataset.opens).showModal();
    });
  }
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("mousedown", (event) => event.target === dialog && dialog.close());
  }
  for (const button of element("menu").querySelectorAll("button")) button.addEventListener("click", () => element("menu").hidePopover?.());
}

function connectTheme() {
  const select = element("theme");
  select.value = document.documentElement.dataset.theme ?? "";
  select.addEventListener("change", () => {
    document.documentElement.dataset.theme = select.value;
    localStorage.setItem("oatmill-theme", select.value);
  });
}

function showName(info) {
  element("model").textContent = info.model_id;
  document.title = info.model_id;
}

/** Shows or hides what belongs to the chat only, such as the list of conversations. */
function showChatParts(shown) {
  document.body.classList.toggle("without-chat", !shown);
  for (const part of document.querySelectorAll("[data-chat]")) part.hidden = !shown;
}

/** Shows one of the views at a time. views: [name, element] each. */
function showViews(views) {
  const select = (chosen) => {
    for (const [, view] of views) view.hidden = view !== chosen;
    for (const tab of element("tabs").children) tab.setAttribute("aria-selected", String(tab.dataset.view === chosen.id));
    showChatParts(chosen.id === "chat");
  };
  for (const [name, view] of views) {
    const tab = make("button", { type: "button", role: "tab", data: { view: view.id }, "aria-controls": view.id, on: { click: () => select(view) } }, name);
    element("tabs").append(tab);
  }
  element("tabs").hidden = views.length < 2;
  select(views[0][1]);
}

function encoderViews({ encoders }) {
  return encoders.map((encoder) => {
    const ranks = encoder.task === "rank";
    const [name, view] = !ranks
      ? ["Similarity", similarityView]
      : encoder.columns > 1
        ? ["Labels", labelsView]
        : ["Ranking", rankingView];
    const section = make("section", { id: name.toLowerCase(), className: "view", "aria-label": name }, view(encoder));
    element("views").append(section);
    return [name, section];
  });
}

async function start() {
  drawIcons();
  connectDialogs();
  connectTheme();
  showChatParts(false);
  const info = await whenReady();
  showName(info);
  showLoad(element("load-dialog"), info);
  const views = encoderViews(info);
  if (generates(info)) {
    views.unshift(["Chat", element("chat")]);
    const refresh = () => chat?.sidebar.refresh();
    const chat = new ChatView(info, await Storage.open(() => refresh()), () => element("options-dialog").showModal());
    showCode(element("code-dialog"), () => chat.currentRequest());
    showViews(views);
    await chat.start();
    if (matchMedia("(pointer: fine)").matches) chat.composer.focus();
  } else showViews(views);
}

start();
