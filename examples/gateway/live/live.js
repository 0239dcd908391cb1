// The page of the gateway's live view: it asks for live.json each second and draws what it says.
"use strict";

const $ = (id) => document.getElementById(id);
let paused = false;
let last = null; // the newest answer
let before = null; // the one before, for rates

// el makes an element. Text never becomes markup.
function el(tag, cls, ...children) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  for (const c of children) e.append(c);
  return e;
}

const number = (n) => (n >= 100 ? Math.round(n).toString() : n >= 10 ? n.toFixed(1) : n.toFixed(2).replace(/\.?0+$/, "")) || "0";
const duration = (ms) => (ms >= 10000 ? (ms / 1000).toFixed(1) + " s" : ms >= 1000 ? (ms / 1000).toFixed(2) + " s" : ms >= 10 ? Math.round(ms) + " ms" : ms.toFixed(1) + " ms");
const short = (id) => (id.length > 18 ? id.slice(0, 8) + "…" + id.slice(-8) : id);

function fact(name, value) {
  return el("div", "", el("dt", "", name), el("dd", "", value));
}

// rate is how much a total has risen each second since the answer before.
function rate(model, of) {
  if (!before) return "–";
  const old = before.models.find((m) => m.model === model.model);
  const seconds = (Date.parse(last.time) - Date.parse(before.time)) / 1000;
  if (!old || seconds <= 0) return "–";
  return number(Math.max(0, of(model.totals) - of(old.totals)) / seconds) + "/s";
}

const sum = (o) => Object.values(o || {}).reduce((a, b) => a + b, 0);

function engines(model) {
  const most = Math.max(1, ...model.endpoints.map((e) => e.load));
  const order = ["encode", "prefill", "both", "decode"];
  const list = [...model.endpoints].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role) || (a.id < b.id ? -1 : 1));
  const body = list.map((e) => {
    const state = el("td", e.healthy && e.phase === "ready" ? "good" : "bad", e.phase.replace("_", " "));
    if (e.lastProbeFault) state.title = e.lastProbeFault;
    const meter = el("span", "meter", el("i", ""));
    meter.firstChild.style.width = (100 * e.load) / most + "%";
    const kv = e.engine ? Math.round(100 * e.engine.kvUsage) + " %" : "–";
    const queue = e.engine ? e.engine.running + " / " + e.engine.waiting : "–";
    return el("tr", "", el("td", "id", e.id), el("td", "", e.role), state, el("td", "number", String(e.load)),
      el("td", "wide", meter), el("td", "number wide", queue), el("td", "number wide", kv));
  });
  const head = el("tr", "", el("th", "", "engine"), el("th", "", "role"), el("th", "", "state"),
    el("th", "number", "requests"), el("th", "wide", ""), el("th", "number wide", "runs / waits"), el("th", "number wide", "KV"));
  return el("table", "", el("thead", "", head), el("tbody", "", ...body));
}

function model(m) {
  const inFlight = sum(m.phases);
  const errors = Object.entries(m.totals.errors || {}).sort((a, b) => b[1] - a[1]).map(([code, n]) => code + " " + n).join(", ");
  const facts = el("dl", "facts", fact("in flight", String(inFlight)), fact("attempts", rate(m, (t) => t.served + sum(t.errors))),
    fact("failed", rate(m, (t) => sum(t.errors))), fact("tokens out", m.totals.output ? rate(m, (t) => t.output) : "–"),
    fact("waiting", String((m.phases.pick || 0) + (m.phases.backoff || 0))), fact("prefill", String((m.phases.prefill || 0) + (m.phases.prepare || 0) + (m.phases.encode || 0) + (m.phases.event || 0))),
    fact("decode", String((m.phases.decode || 0) + (m.phases.stream || 0))));
  const card = el("article", "card",
    el("header", "", el("h3", "", m.model || "any model"), el("span", "soft", m.connector + (m.rollout ? ", rollout " + m.rollout : "")),
      el("span", m.ready ? "good" : "bad", m.ready ? "ready" : m.reason)), facts, engines(m));
  if (errors) card.append(el("p", "soft", "Failed attempts so far: " + errors));
  return card;
}

// parts are the pieces of a timeline, each with its length in ms.
function parts(r) {
  const out = [];
  const add = (cls, from, to) => { if (to > from) out.push([cls, to - from]); };
  const end = r.end;
  if (r.running) { // only its phase is known
    add({ prefill: "prefill", event: "handoff", decode: "first", stream: "stream" }[r.phase] || "wait", 0, end);
    return out;
  }
  if (r.prefillStart === undefined && r.decodeStart === undefined) {
    add("wait", 0, end);
    return out;
  }
  add("wait", 0, r.prefillStart ?? r.decodeStart);
  if (r.prefillStart !== undefined) {
    const until = r.prefillEnd ?? end;
    const overlap = r.decodeStart !== undefined && r.decodeStart < until;
    add("prefill", r.prefillStart, until);
    if (r.decodeStart !== undefined && !overlap) add("handoff", until, r.decodeStart);
    if (r.decodeStart === undefined) return out;
    add("first", Math.max(until, r.decodeStart), Math.max(until, r.firstToken ?? end));
  } else {
    add("first", r.decodeStart, r.firstToken ?? end);
  }
  if (r.firstToken !== undefined) add("stream", Math.max(r.firstToken, r.prefillEnd ?? 0), end);
  return out;
}

function request(r, longest) {
  const bar = el("span", "bar");
  for (const [cls, ms] of parts(r)) {
    const piece = el("i", cls);
    piece.style.width = (100 * ms) / longest + "%";
    piece.title = cls + " " + duration(ms);
    bar.append(piece);
  }
  if (r.error) bar.append(Object.assign(el("i", "failed"), { title: r.error }));
  if (r.error) bar.lastChild.style.width = ".4rem";
  const what = el("span", r.error ? "what bad" : "what soft", r.error || (r.running ? r.phase : r.mode));
  const took = el("span", "took", duration(r.end) + (r.output ? " · " + r.output + " tok" : ""));
  const id = el("span", "id", short(r.requestId) + (r.attempt > 1 ? " #" + r.attempt : ""));
  id.title = r.requestId + "\nprefill " + (r.prefill || "–") + "\ndecode " + (r.decode || "–") + (r.retry ? "\n" + r.retry : "") + (r.resumed ? "\nrescued after " + r.resumed + " tokens" : "");
  return el("div", "request" + (r.running ? " running" : ""), id, what, bar, took);
}

function draw() {
  if (!last) return;
  const ready = last.models.every((m) => m.ready);
  const state = last.draining ? "draining" : ready ? "ready" : "not ready";
  $("state").replaceChildren(el("span", ready && !last.draining ? "good" : "bad", state), " · " + last.time.slice(11, 19) + " UTC" + (paused ? " · paused" : ""));
  $("models").replaceChildren(...last.models.map(model));
  const filter = $("filter").value;
  const running = last.requests.filter((r) => r.running);
  const ended = last.requests.filter((r) => !r.running && (filter !== "failed" || r.error));
  const longest = Math.max(1, ...last.requests.map((r) => r.end));
  const table = (title, rows, most) => {
    const card = el("article", "card", el("h3", "", title), ...rows.slice(0, most).map((r) => request(r, longest)));
    if (rows.length > most) card.append(el("p", "soft", "and " + (rows.length - most) + " more"));
    if (!rows.length) card.append(el("p", "soft", "none"));
    return card;
  };
  const cards = [];
  if (filter !== "failed") cards.push(table("in flight", running, filter ? 100 : 5));
  if (filter !== "running") cards.push(table(filter ? "failed" : "ended", ended, 60));
  $("requests").replaceChildren(...cards);
}

async function ask() {
  if (!paused) {
    try {
      const response = await fetch("live.json", { cache: "no-store" });
      if (!response.ok) throw new Error("status " + response.status);
      const now = await response.json();
      before = last;
      last = now;
      draw();
    } catch (e) {
      $("state").replaceChildren(el("span", "bad", "the gateway does not answer"));
    }
  }
  setTimeout(ask, 1000);
}

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  draw();
}

$("pause").addEventListener("click", pause);
$("filter").addEventListener("change", draw);
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.tagName === "SELECT") return;
  if (e.key === "p") pause();
  if (e.key === "f") $("filter").focus();
});
ask();
