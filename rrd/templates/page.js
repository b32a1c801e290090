// Keeps the page up to date from /events, and finds jobs. Everything else the server has rendered.
"use strict";

const rows = document.getElementById("rows"), find = document.getElementById("find"), none = document.getElementById("none");
const link = document.getElementById("link"), template = document.createElement("template");
const table = rows.closest("table"), label = find.closest("label");
const held = new Map(); // parts that wait because somebody is selecting text in them
let state = "";

function replace(id, html) {
  template.innerHTML = html;
  const fresh = template.content.firstElementChild, old = document.getElementById(id);
  if (!old) return rows.append(fresh);
  const focus = old.contains(document.activeElement) ? document.activeElement : null;
  const same = focus && (focus.dataset.state ? `[data-state="${focus.dataset.state}"]` : "a");
  old.replaceWith(fresh);
  if (fresh.dataset.title) document.title = fresh.dataset.title;
  if (same) fresh.querySelector(same)?.focus({ preventScroll: true });
}

function selected(id) {
  const chosen = getSelection(), old = document.getElementById(id);
  return old && !chosen.isCollapsed && chosen.containsNode(old, true);
}

function take(patch) {
  for (const [id, html] of Object.entries(patch.html ?? {})) held.set(id, html);
  for (const [id, html] of held) {
    if (selected(id)) continue;
    replace(id, html);
    held.delete(id);
  }
  if (patch.jobs) arrange(patch.jobs);
  if (patch.jobs || patch.html) sift();
}

function arrange(ids) {
  const wanted = new Set(ids);
  for (const row of [...rows.children]) if (!wanted.has(row.id)) row.remove();
  let at = rows.firstElementChild;
  for (const id of ids) {
    if (at && at.id === id) at = at.nextElementSibling;
    else rows.insertBefore(document.getElementById(id), at);
  }
}

function sift() {
  const text = find.value.trim().toLowerCase();
  let left = 0;
  for (const row of rows.children) {
    const hit = (!state || row.dataset.state === state) && (!text || row.cells[0].textContent.toLowerCase().includes(text));
    if (row.hidden === hit) row.hidden = !hit;
    left += hit;
  }
  none.hidden = left > 0 || rows.children.length === 0;
  table.hidden = left === 0;
  label.hidden = rows.children.length === 0;
  for (const chip of document.querySelectorAll("button.chip"))
    chip.setAttribute("aria-pressed", chip.dataset.state === state);
}

document.addEventListener("click", (event) => {
  const chip = event.target.closest("button.chip");
  if (!chip) return;
  state = state === chip.dataset.state ? "" : chip.dataset.state;
  sift();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== find) { find.focus(); event.preventDefault(); }
  if (event.key === "Escape" && document.activeElement === find) { find.value = ""; sift(); }
});
find.addEventListener("input", sift);
label.hidden = rows.children.length === 0;

function say(text, kind) {
  if (link.textContent !== text) link.textContent = text; // said once, not every second
  link.className = kind;
}

function listen() {
  const source = new EventSource("events?" + document.body.dataset.seen);
  source.addEventListener("live", () => say("live", "live"));
  source.onmessage = (event) => { say("live", "live"); take(JSON.parse(event.data)); };
  source.onerror = () => say("rrd does not answer; what you see is old", "lost");
}
listen();
