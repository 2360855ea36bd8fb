// Puts the page together: tabs, controls, conversations, the running answer, the live feed and the status line.

import { getJSON, setKey } from "./api.js";
import { build, problem, read } from "./controls.js";
import { Conversations } from "./conversations.js";
import { Live } from "./live.js";
import { Memory } from "./memory.js";
import { curl, python } from "./snippet.js";
import { Answer, chatTarget, footer, message, textTarget } from "./talk.js";
import { Xray } from "./xray.js";

const $ = (id) => document.getElementById(id);
const form = $("controls");
const store = new Conversations();
const xray = new Xray($("view-xray"));
const memory = new Memory($("view-memory"));
let model = "";
let answer = null;

function say(text) {
  $("banner").textContent = text;
  $("banner").hidden = text === "";
}

function setStatus(state, text) {
  if ($("status").dataset.state === state) return;
  $("status").dataset.state = state;
  $("status").textContent = { ready: "ready", restarting: "restarting", lost: "connection lost", locked: "needs a key" }[state];
  say(text);
  if (state === "ready") loadModel();
}

const live = new Live($("view-live"), setStatus);

async function loadModel() {
  try {
    const models = await getJSON("v1/models");
    model = models.data[0].id;
    $("model-name").textContent = model;
    showCode();
  } catch (error) {
    say(error.message);
  }
}

// Tabs: Chat and Complete share a panel; arrow keys move between tabs as the pattern asks.
const tabs = [...document.querySelectorAll("[role=tab]")];

function openTab(tab, focus = false) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
  }
  const panel = tab.getAttribute("aria-controls");
  for (const section of document.querySelectorAll("[role=tabpanel]")) section.hidden = section.id !== panel;
  if (panel === "view-talk") {
    $(panel).setAttribute("aria-labelledby", tab.id);
    const completing = tab.id === "tab-complete";
    $("messages").hidden = completing;
    $("completion").hidden = !completing;
    $("prompt").hidden = completing;
    showCode();
  }
  if (panel === "view-live") live.draw();
  if (focus) tab.focus();
}

for (const tab of tabs) tab.addEventListener("click", () => openTab(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  openTab(tabs[(to + tabs.length) % tabs.length], true);
});

const completing = () => $("tab-complete").getAttribute("aria-selected") === "true";

// The request as it would be sent now: [path, body].
function request(extra = []) {
  const fields = read(form);
  if (completing()) return ["v1/completions", { model, prompt: $("completion-text").value, ...fields }];
  const system = form.elements.system.value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...store.current.messages, ...extra];
  return ["v1/chat/completions", { model, messages, ...fields }];
}

function showCode() {
  const draft = $("prompt").value.trim();
  const [path, body] = request(draft ? [{ role: "user", content: draft }] : []);
  $("code").textContent = curl(`/${path}`, body, location.origin);
}

async function copy(make) {
  const draft = $("prompt").value.trim();
  const [path, body] = request(draft ? [{ role: "user", content: draft }] : []);
  const text = make(`/${path}`, body, location.origin);
  $("code").textContent = text;
  try {
    await navigator.clipboard.writeText(text);
    $("copy-note").textContent = "copied";
  } catch {
    $("copy-note").textContent = "The browser refused the clipboard: mark the text below and copy it.";
  }
}

function showConversation() {
  const list = $("messages");
  list.replaceChildren(...store.current.messages.map(({ role, content }) => message(role, content).box));
  if (!store.current.messages.length) {
    const empty = Object.assign(document.createElement("p"), { className: "empty", textContent: "This page talks to the model on this server and shows what happens inside: every token with what else it could have been, the cache of an endless stream, and the service at work." });
    list.append(empty);
  }
  list.scrollTop = list.scrollHeight;
  showConversations();
}

function showConversations() {
  $("conversation-list").replaceChildren(...store.all.map((one) => {
    const open = Object.assign(document.createElement("button"), { type: "button", className: "name", textContent: one.title });
    open.setAttribute("aria-current", String(one === store.current));
    open.addEventListener("click", () => {
      store.open(one.id);
      showConversation();
    });
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "✕" });
    remove.setAttribute("aria-label", `Delete “${one.title}”`);
    remove.addEventListener("click", () => {
      store.remove(one.id);
      showConversation();
    });
    const item = document.createElement("li");
    item.append(open, remove);
    return item;
  }));
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  for (const id of ["conversation-new"]) $(id).disabled = on;
}

const views = {
  xray,
  memory,
  progress(tokens, elapsed, usage) {
    const evicted = usage?.tokens_evicted ? ` · ${usage.tokens_evicted} evicted` : "";
    $("progress").textContent = tokens ? `${tokens} tokens · ${(tokens / Math.max(elapsed, 1) * 1000).toFixed(0)} a second${evicted}` : "waiting for the first token …";
  },
};

async function run(target, path, body) {
  answer = new Answer(target, views);
  busy(true);
  say("");
  const start = performance.now();
  views.progress(0, 0, null);
  const trouble = await answer.run(path, { ...body, watch: true });
  const line = footer(answer, performance.now() - start);
  $("progress").textContent = line;
  if (trouble) say(trouble);
  busy(false);
  return { done: answer, line, trouble };
}

async function sendChat(text) {
  const list = $("messages");
  list.querySelector(".empty")?.remove();
  const [path, body] = request([{ role: "user", content: text }]);
  list.append(message("user", text).box);
  const target = chatTarget(list);
  $("prompt").value = "";
  const conversation = store.current;
  const { done, line, trouble } = await run(target, path, body);
  const note = Object.assign(document.createElement("footer"), { textContent: trouble || line, className: trouble ? "failed" : "" });
  target.box.append(note);
  if (trouble && !done.text) {
    $("prompt").value ||= text; // nothing came: the reader need not type it again
    return;
  }
  conversation.messages.push({ role: "user", content: text }, { role: "assistant", content: done.text });
  const full = store.save();
  if (full) say(full);
  showConversations();
}

async function send() {
  const wrong = problem(form);
  if (wrong) {
    $("controls-box").open = true;
    form.elements[wrong.name].focus();
    say(`Please mend the marked control. ${wrong.message}`);
    return;
  }
  if (completing()) {
    const [path, body] = request();
    await run(textTarget($("completion-answer")), path, body);
    return;
  }
  const text = $("prompt").value.trim();
  if (text) await sendChat(text);
  else $("prompt").focus();
}

function save(text, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!$("send").disabled) send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => answer?.stop());
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("stop").disabled) answer?.stop();
});
$("prompt").addEventListener("input", showCode);
$("completion-text").addEventListener("input", showCode);
$("copy-curl").addEventListener("click", () => copy(curl));
$("copy-python").addEventListener("click", () => copy(python));
$("api-key").addEventListener("change", (event) => {
  setKey(event.target.value);
  loadModel();
});
$("conversation-new").addEventListener("click", () => {
  store.start();
  showConversation();
  $("prompt").focus();
});
$("conversation-export").addEventListener("click", () => save(store.exported(), "everstream-conversations.json"));
$("conversation-import").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const added = store.imported(await file.text());
    $("copy-note").textContent = "";
    say(added ? "" : "These conversations were here already.");
    showConversation();
  } catch (error) {
    say(error.message);
  }
});

build(form, showCode);
if (matchMedia("(max-width: 760px)").matches) $("controls-box").open = false;
showConversation();
showCode();
live.follow();
