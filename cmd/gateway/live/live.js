// The page of the gateway's live view: it asks for live.json each second and draws what that says.
"use strict";

const $ = (id) => document.getElementById(id);
let paused = false;
let last = null; // the newest answer
let fault = ""; // why the newest answer is not shown; it stays until there is a good one

// el makes an element. Text never becomes markup.
function el(tag, cls, ...children) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  e.append(...children);
  return e;
}

const sum = (o) => Object.values(o || {}).reduce((a, b) => a + b, 0);
const short = (id) => (id.length > 18 ? id.slice(0, 8) + "…" + id.slice(-8) : id);
const tail = (id) => (id.length > 16 ? "…" + id.slice(-15) : id); // of an engine: names of pods differ at their ends
const clock = (time) => time.slice(11, 19);
const percent = (n, of) => (of && n ? (n / of < 0.01 ? "below 1 %" : Math.round((100 * n) / of) + " %") : "0 %");

function number(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(1) + "G";
  if (n >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (n >= 1e4) return (n / 1e3).toFixed(n >= 1e5 ? 0 : 1) + "k";
  if (n >= 100 || Number.isInteger(n)) return String(Math.round(n));
  return n.toFixed(n >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

function bytes(n) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (n < 1000) return (n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)) + " " + unit;
    n /= 1000;
  }
  return n.toFixed(1) + " TB";
}

function duration(ms) {
  if (ms >= 1000) return (ms / 1000).toFixed(ms >= 10000 ? 1 : 2) + " s";
  if (ms < 0.1) return Math.round(1000 * ms) + " µs";
  return (ms >= 10 ? Math.round(ms) : ms.toFixed(1)) + " ms";
}

// same makes the children of parent those of wanted, each under its key, and moves none that stays where it is: a moved
// element would lose the keyboard's focus.
function same(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const child of wanted) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}

function fact(name, value, note, ...more) {
  const dd = el("dd", "", value, ...more);
  if (note) dd.append(el("small", "", note));
  return el("div", "", el("dt", "", name), dd);
}

// line draws a value for each minute of the last hour, the newest at the right. Values below 0 are not known.
function line(cls, name, values, most, text) {
  const path = ["0 100%"];
  values.forEach((v, i) => {
    const x = (at) => ((60 - values.length + at) * 100) / 60 + "% ";
    const y = 100 - (100 * Math.max(0, v)) / most + "%";
    path.push(x(i) + "100%", x(i) + y, x(i + 1) + y, x(i + 1) + "100%");
  });
  const area = el("i", cls);
  area.style.clipPath = "polygon(" + path.join(", ") + ")";
  const l = el("span", "line", area);
  const known = values.filter((v) => v >= 0);
  l.setAttribute("role", "img");
  l.setAttribute("aria-label", name + ", each minute of the last hour: " + (known.length
    ? text(Math.min(...known)) + " to " + text(Math.max(...known)) : "nothing"));
  return l;
}

// counts draws a line of counts, without the minute that is not over yet.
function counts(cls, name, values, text = number) {
  const whole = (values || []).slice(0, values && values.length > 1 ? -1 : 1);
  return line(cls, name, whole, Math.max(1, ...whole), text);
}

// rate is a count of the last minute for each second.
const rate = (m, count, text = number) => text(count / Math.max(1, m.minute.seconds)) + "/s";

const hour = (m) => (m.hour.seconds > 3500 ? "in the last hour"
  : "in " + (m.hour.seconds >= 120 ? Math.round(m.hour.seconds / 60) + " min" : Math.round(m.hour.seconds) + " s"));

const place = (o) => o.inFlight + (o.limit ? " of " + o.limit : "");

// kvFacts never guess: what neither responses nor engines count has a dash.
function kvFacts(m) {
  const by = m.totals.reused ? "responses" : m.kv && m.kv.taken ? "engines" : "";
  const taken = (span) => (m.totals.reused ? span.reused : span.taken);
  const moved = m.kv && m.kv.bytes;
  return [
    fact("KV taken over", by ? rate(m, taken(m.minute)) : "–",
      by ? number(taken(m.hour)) + " tokens " + hour(m) + ", by " + by : "nobody counts it",
      ...(by ? [counts("", "tokens taken over", m.past.taken)] : [])),
    fact("KV moved", moved ? rate(m, m.minute.bytes, bytes) : "–",
      moved ? bytes(m.hour.bytes) + " " + hour(m) + ", by engines" : "nobody counts it",
      ...(moved ? [counts("", "KV moved", m.past.bytes, bytes)] : [])),
  ];
}

const times = (q) => (q ? duration(q.p50) + " / " + duration(q.p99) : "–");

function facts(m) {
  const phase = (...names) => names.reduce((n, name) => n + (m.phases[name] || 0), 0);
  const a = m.admission;
  const lost = m.minute.failed ? "bad" : "";
  const first = m.past.first || [];
  const out = [
    fact("served", rate(m, m.minute.served), number(m.hour.served) + " " + hour(m),
      counts("", "served", m.past.served)),
    fact("failed for clients", el("span", lost, rate(m, m.minute.failed)),
      number(m.hour.failed) + " " + hour(m), counts("failed", "failed for clients", m.past.failed)),
    fact("failed attempts", rate(m, m.minute.broken), number(m.hour.broken) + " " + hour(m) +
      "; another attempt served " + number(m.hour.mended) + " of them"),
    fact("clients left", rate(m, m.minute.left), number(m.hour.left) + " " + hour(m) + ", before the end"),
    fact("TTFT p50 / p99", times(m.minute.first), m.hour.first ? times(m.hour.first) + " " + hour(m)
      : "no streams", ...(m.hour.first ? [line("", "99th percentile of the time to the first token", first,
        Math.max(1, ...first), duration)] : [])),
    fact("tokens out", m.totals.output ? rate(m, m.minute.output) : "–",
      m.totals.output ? number(m.hour.output) + " " + hour(m) : "not counted",
      ...(m.totals.output ? [counts("", "tokens out", m.past.output)] : [])),
    fact("in flight", String(sum(m.phases)), "requests, now"),
    fact("queue", String(a ? a.queued : phase("pick")), "wait, " + phase("backoff") + " to retry"),
    fact("prefill", a ? place(a.prefill) : String(phase("prepare", "encode", "prefill", "event")), "in flight"),
    fact("decode", a ? place(a.decode) : String(phase("decode", "stream")), "in flight"),
  ];
  if (a) {
    const reasons = Object.entries(a.refused).filter(([, n]) => n);
    const why = reasons.map(([reason, n]) => reason.replaceAll("_", " ") + " " + n);
    out.push(fact("refused", rate(m, m.minute.refused), number(m.hour.refused) + " " + hour(m) +
      (why.length ? "; since the start " + why.join(", ") : "")));
  }
  return [...out, ...kvFacts(m)];
}

// row makes a row. Each cell is [class, content]; the first one heads the row.
function row(...cells) {
  const tr = el("tr", "");
  cells.forEach(([cls, ...content], i) => {
    const cell = el(i ? "td" : "th", cls, ...content);
    if (!i) cell.scope = "row";
    tr.append(cell);
  });
  return tr;
}

function table(label, heads, rows) {
  const head = el("tr", "", ...heads.map(([cls, text]) => Object.assign(el("th", cls, text), { scope: "col" })));
  const t = el("table", "", el("thead", "", head), el("tbody", "", ...rows));
  t.setAttribute("aria-label", label);
  return t;
}

function meter(...parts) {
  const m = el("span", "meter");
  for (const [cls, share] of parts) {
    const i = el("i", cls);
    i.style.width = 100 * share + "%";
    m.append(i);
  }
  m.setAttribute("aria-hidden", "true"); // the number beside it says the same
  return m;
}

const stands = (x) => (x.state === "cooldown" ? "cooldown " + duration(x.left || 0) : x.state);

const rowsFirst = 12; // engines, and pairs, that are shown before one asks for all

// choose returns the rows that are shown, in their order: those of which something is said, and the busiest.
function choose(list, all, said, busy) {
  if (all || list.length <= rowsFirst) return [...list];
  const first = new Set([...list].sort((a, b) => said(b) - said(a) || busy(b) - busy(a)).slice(0, rowsFirst));
  return list.filter((x) => first.has(x));
}

const well = (e) => e.healthy && e.phase === "ready";

// troubles are what is wrong with an engine, the worst first. One that drains is well, and a cooldown alone comes with
// few faults.
const words = [
  "KV incomplete", "KV unknown", "draining", "cooldown", "slow", "overloaded", "lease over", "cut streams", "lacks the model", "failing",
  "hung", "quarantine", "not ready",
];
function troubles(e) {
  const out = ((e.recent || {}).marks || []).map((mark) => ({ ...mark, text: mark.word }));
  if (e.state) out.push({ word: e.state, text: stands(e) });
  if (e.kvEvents && e.kvEvents !== "exact") out.push({ word: "KV " + e.kvEvents, text: "KV " + e.kvEvents });
  if (!well(e)) {
    const word = e.phase === "draining" ? "draining" : "not ready";
    out.push({ word, text: word, since: e.illSince });
  }
  for (const x of out) x.rank = words.indexOf(x.word);
  return out.sort((a, b) => b.rank - a.rank);
}
const worst = (e) => Math.max(-1, ...troubles(e).map((x) => x.rank));
const sick = (e) => worst(e) > words.indexOf("cooldown");
const colour = (rank) => (words.indexOf("slow") >= rank ? "warn" : "bad");

// byHealth orders engines: the worst first.
function byHealth(a, b) {
  const order = ["encode", "prefill", "both", "decode"];
  const share = (e) => (e.recent && e.recent.attempts ? Math.round((20 * e.recent.failed) / e.recent.attempts) : 0);
  return worst(b) - worst(a) || (sick(a) && share(b) - share(a)) ||
    order.indexOf(a.role) - order.indexOf(b.role) || (a.id < b.id ? -1 : 1);
}

// says tells more of what is wrong with an engine.
function says(e, x) {
  const r = e.recent || {};
  const share = x.of ? percent(x.count, x.of) + " of " + number(x.of) : "";
  const why = { failing: share + " attempts failed", "cut streams": share + " attempts ended in a cut stream",
    overloaded: share + " attempts got status 429 or 503",
    "lease over": "the KV of " + share + " attempts was not read within its lease",
    "lacks the model": share + " attempts were told that it does not serve the model", "not ready": e.lastProbeFault };
  if (x.word === "slow" && r.first) {
    why.slow = share + " first tokens came later than " + duration(r.limit || 0) + ": p50 " + duration(r.first.p50) +
      ", p99 " + duration(r.first.p99);
  }
  return [why[x.word], x.since && "since " + clock(x.since)].filter(Boolean).join(", ");
}

const sickFirst = 5; // engines that are named before the table

function sickList(m) {
  const list = m.endpoints.filter(sick).sort(byHealth);
  const rows = list.slice(0, sickFirst).map((e) => {
    const x = troubles(e)[0];
    return el("li", "", el("span", "mark " + colour(x.rank), x.text), el("span", "id", e.id), el("span", "", e.role),
      el("span", "soft", says(e, x)));
  });
  if (list.length > sickFirst) rows.push(el("li", "soft", "and " + (list.length - sickFirst) + " more"));
  return rows;
}

function engines(m, all) {
  const list = choose(m.endpoints, all, (e) => worst(e) + 1, (e) => e.load).sort(byHealth);
  const most = Math.max(1, ...list.map((e) => (e.recent || {}).attempts || 0));
  const rows = list.map((e) => {
    const what = troubles(e);
    const state = what.map((x) => el("span", "state", el("span", colour(x.rank), x.text),
      ...(x.since ? [el("small", "soft", "since " + clock(x.since))] : [])));
    if (!what.length) state.push(el("span", "soft", "ready"));
    if (e.lastProbeFault && !well(e)) state.push(el("small", "", e.lastProbeFault));
    const limit = Math.max((e.prefill || {}).limit || 0, (e.decode || {}).limit || 0);
    const said = (value) => (e.engine ? value(e.engine) : "–");
    const r = e.recent || { attempts: 0, failed: 0, past: [] };
    return row(["id", e.id], ["role", e.role], ["", ...state], ["number wide", number(r.attempts)],
      [r.failed ? "number bad" : "number",
        r.failed ? number(r.failed) + " (" + percent(r.failed, r.attempts) + ")" : "0"],
      ["wide", meter(["", (r.attempts - r.failed) / most], ["failed", r.failed / most])],
      ["number wide", times(r.first)],
      ["wide", line("failed", e.id + ": failed or late", r.past, Math.max(10, ...r.past), (v) => v + " %")],
      ["number wide", e.load + (limit ? " of " + limit : "")],
      ["number wide", said((x) => x.running + " / " + x.waiting)],
      ["number wide", said((x) => Math.round(100 * x.kvUsage) + " %")]);
  });
  return table("Engines of " + m.model, [["", "engine"], ["", "role"], ["", "state"], ["number wide", "attempts"],
    ["number", "failed"], ["wide", ""], ["number wide", "TTFT p50 / p99"], ["wide", "last hour"],
    ["number wide", "in flight"], ["number wide", "runs / waits"], ["number wide", "KV used"]], rows);
}

function pairs(m, all) {
  const busy = (p) => p.served + p.failed;
  const share = (p) => Math.round((20 * p.failed) / Math.max(1, busy(p)));
  const list = choose(m.pairs, all, (p) => !!p.state, busy).sort((a, b) => share(b) - share(a));
  const most = Math.max(1, ...list.map(busy));
  const told = list.some((p) => p.reused);
  const rows = list.map((p) => row(["id pair", el("span", "", p.prefill), el("span", "", "→ " + p.decode),
    ...(p.state ? [el("small", p.state === "cooldown" ? "warn" : "bad", stands(p))] : [])],
    ["number", number(p.served)], [p.failed ? "number bad" : "number", number(p.failed)],
    ["wide", meter(["", p.served / most], ["failed", p.failed / most])],
    ["number wide", p.handoff === undefined ? "–" : duration(p.handoff)],
    ["number", p.transfer === undefined ? "–" : duration(p.transfer)],
    ...(told ? [["number wide", p.reused ? number(p.reused) : "–"]] : [])));
  return table("Pairs of " + m.model, [["", "prefill → decode"], ["number", "served"], ["number", "failed"],
    ["wide", ""], ["number wide", "handoff"], ["number", "to first token"],
    ...(told ? [["number wide", "tokens taken over"]] : [])], rows);
}

const cards = new Map(); // by model: the parts of a card that stay
let made = 0; // cards, for their ids

function part(title) {
  const count = el("span", "");
  const d = el("details", "part", el("summary", "", title, count));
  d.open = true;
  const p = { d, count, all: false, body: d.appendChild(el("div", "")), more: d.appendChild(el("button", "")) };
  p.more.type = "button";
  p.more.addEventListener("click", () => { p.all = !p.all; draw(); });
  return p;
}

// show draws a part of n rows.
function show(p, n, note, drawn) {
  p.count.textContent = n + note;
  p.body.replaceChildren(drawn);
  p.more.hidden = n <= rowsFirst;
  p.more.textContent = p.all ? "Show " + rowsFirst : "Show all " + n;
}

function newCard(m) {
  const c = { head: el("header", ""), sick: el("ul", "sick"), facts: el("dl", "facts"), engines: part("Engines"),
    pairs: part("Pairs"), others: el("p", "soft"), errors: el("p", "soft") };
  c.title = c.head.appendChild(el("h3", "", m.model || "any model"));
  c.title.id = "model-" + made++;
  c.about = c.head.appendChild(el("span", "soft"));
  c.ready = c.head.appendChild(el("span", ""));
  c.sick.setAttribute("aria-label", "Engines of " + m.model + " that are not well");
  c.pairs.d.append(c.others);
  c.card = el("article", "card", c.head, c.sick, c.facts, c.engines.d, c.pairs.d, c.errors);
  c.card.setAttribute("aria-labelledby", c.title.id);
  return c;
}

function model(m) {
  if (!cards.has(m.model)) cards.set(m.model, newCard(m));
  const c = cards.get(m.model);
  c.about.textContent = m.connector + (m.rollout ? ", rollout " + m.rollout : "");
  c.ready.className = m.ready ? "good" : "bad";
  c.ready.textContent = m.ready ? "ready" : m.reason;
  const ill = sickList(m);
  if (!ill.length) ill.push(el("li", "soft", "No engine is worse than the others."));
  c.sick.replaceChildren(...ill);
  c.facts.replaceChildren(...facts(m));
  show(c.engines, m.endpoints.length, ", in the last minute; TTFT: the engine's part of the time to the " +
    "first token", engines(m, c.engines.all));
  c.pairs.d.hidden = !m.pairs.length;
  show(c.pairs, m.pairs.length, (m.otherPairs ? ", the busiest" : "") + ", since the start", pairs(m, c.pairs.all));
  const o = m.otherPairs;
  if (o) c.others.textContent = "Other pairs: " + number(o.served) + " served, " + number(o.failed) + " failed";
  c.others.hidden = !o;
  const errors = Object.entries(m.totals.errors || {}).sort((a, b) => b[1] - a[1]);
  c.errors.textContent = errors.length
    ? "Attempts that failed since the start: " +
      errors.map(([code, n]) => code.replaceAll("_", " ") + " " + n).join(", ") : "";
  return c.card;
}

// parts are the pieces of a timeline: class and length in ms.
function parts(r) {
  const out = [];
  const add = (cls, from, to) => { if (to > from) out.push([cls, to - from]); };
  const first = r.prefillStart ?? r.decodeStart ?? r.end;
  const picked = Math.min(r.picked ?? first, first);
  add("queue", 0, picked);
  add("prepare", picked, first);
  if (r.prefillStart !== undefined) {
    const until = r.prefillEnd ?? r.end;
    add("prefill", r.prefillStart, until);
    if (r.decodeStart === undefined) {
      add("handoff", until, r.end);
      return out;
    }
    add("handoff", until, r.decodeStart); // nothing where the legs run together
  }
  if (r.decodeStart === undefined) return out;
  const start = Math.max(r.decodeStart, r.prefillEnd ?? 0);
  if (r.running && r.phase === "stream") add("decode", start, r.end); // when the first token came is known at the end
  else {
    const token = Math.max(start, r.firstToken ?? r.end);
    add("transfer", start, token);
    add("decode", token, r.end);
  }
  return out;
}

const names = { queue: "queue", prepare: "prepare", prefill: "prefill", handoff: "handoff",
  transfer: "transfer and first token", decode: "decode" };

// Why a failed attempt was retried or was not, by Outcome.Retry: docs/metrics.md.
const retries = { not_accepted: "retried: the engine had not got the request", failed: "retried: an engine failed",
  elsewhere: "retried: the engine that refused speaks of itself alone",
  timeout: "ran out of time", no_pair: "not retried: no other engine is ready",
  orphan: "not retried: a decode engine waits for this prefill's KV",
  budget: "not retried: retries have used up their share", attempts: "not retried: enough attempts",
  fallback: "not retried: a decode engine served it alone", hedge: "its prefill was the slower of two",
  given: "not retried: the caller chose the engines", final: "not retried: another pair would fail in the same way" };

// keysOf tells the requests of a list apart. Clients may give several requests one id, and those in flight that have no
// engines yet have no session: of equal keys each after the first gets a number.
function keysOf(requests) {
  const seen = new Map();
  return requests.map((r) => {
    const key = [r.model, r.requestId, r.attempt, r.running ? r.session || "" : r.start].join(" ");
    const n = (seen.get(key) || 0) + 1;
    seen.set(key, n);
    return n > 1 ? key + " " + n : key;
  });
}

function about(r) {
  const dl = el("dl", "");
  const add = (name, value) => { if (value) dl.append(el("dt", "", name), el("dd", "", value)); };
  add("request", r.requestId);
  add("model", r.model);
  add("prefill", r.prefill);
  add("decode", r.decode);
  add("times", parts(r).map(([cls, ms]) => names[cls] + " " + duration(ms)).join(", "));
  add("tokens", [r.input && r.input + " in", r.output && r.output + " out", r.reused && r.reused + " taken over"]
    .filter(Boolean).join(", "));
  if (r.error) {
    add("error", [r.error.replaceAll("_", " "), r.leg && r.leg + " leg", r.failing,
      r.status && "engine status " + r.status].filter(Boolean).join(", "));
  }
  add("retry", retries[r.retry] || r.retry);
  if (r.resumed) add("rescue", "went on after " + r.resumed + " tokens of a stream whose decode engine died");
  return dl;
}

function what(r) {
  if (r.error) return r.error.replaceAll("_", " ");
  if (r.resumed) return "rescued";
  if (r.silent) return "silent for " + Math.round(r.silent / 1000) + " s";
  return r.running ? (r.phase === "pick" ? "queue" : r.phase) : r.mode;
}

// served names the engines of a request.
function served(r) {
  const names = [r.prefill, r.decode].filter(Boolean);
  const e = el("span", "engines soft", names.map(tail).join(" → ") || "–");
  if (names.length) e.title = names.join(" → ");
  return e;
}

// fill draws a request into its row, which stays the same element.
function fill(li, r, scale) {
  const bar = el("span", r.end > scale ? "bar cut" : "bar");
  for (const [cls, ms] of parts(r)) {
    const piece = el("i", cls);
    piece.style.width = Math.min(100, (100 * ms) / scale) + "%";
    piece.title = names[cls] + " " + duration(ms);
    bar.append(piece);
  }
  if (r.error) bar.append(el("i", "failed"));
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts(r).map(([cls, ms]) => names[cls] + " " + duration(ms)).join(", "));
  const summary = li.firstChild.firstChild;
  summary.replaceChildren(el("span", "id", short(r.requestId), ...(r.attempt > 1
    ? [el("span", "again", "#" + r.attempt)] : [])), served(r),
    el("span", r.error ? "what bad" : "what soft", what(r)), bar,
    el("span", "took", duration(r.end) + (r.output ? " · " + r.output + " tok" : "")));
  while (summary.nextSibling) summary.nextSibling.remove(); // and not the summary, which may have the focus
  if (li.firstChild.open) li.firstChild.append(about(r));
}

function newRow(id) {
  const li = el("li", "", el("details", "", el("summary", "")));
  li.dataset.key = id;
  li.firstChild.firstChild.tabIndex = -1;
  li.firstChild.addEventListener("toggle", () => {
    if (li.firstChild.open) fill(li, li.request, li.scale);
  });
  return li;
}

// scaleOf is the time that the full width stands for: a round one that nearly all bars fit in. One request that took
// very long must not make all others too short to see.
function scaleOf(times) {
  const most = Math.max(1, [...times].sort((a, b) => a - b)[Math.floor(0.95 * times.length)] || 0);
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 7, 10].map((n) => n * power).find((n) => n >= most);
}

// rows draws a list. A row that is open or has the focus stays while it is, although newer ones push it out.
function rows(list, requests) {
  const old = new Map([...list.children].map((li) => [li.dataset.key, li]));
  const keys = keysOf(requests);
  const wanted = new Set(keys);
  const held = [...old.values()].filter((li) => !wanted.has(li.dataset.key) && li.request &&
    (li.firstChild.open || li.contains(document.activeElement)) && !li.request.running);
  const all = [...requests.map((r, i) => [keys[i], r]), ...held.map((li) => [li.dataset.key, li.request])];
  // the order of newest first; those in flight are the oldest first as they come
  if (list.id === "ended") all.sort(([, a], [, b]) => (a.start < b.start ? 1 : a.start > b.start ? -1 : 0));
  const scale = scaleOf(all.map(([, r]) => r.end));
  const lost = document.activeElement && list.contains(document.activeElement) ? document.activeElement : null;
  same(list, all.map(([id, r]) => {
    const li = old.get(id) || newRow(id);
    if (li.request !== r || li.scale !== scale) {
      const changed = r.running || li.scale !== scale || !li.request;
      li.request = r;
      li.scale = scale;
      if (changed) fill(li, r, scale);
    }
    return li;
  }));
  const heads = [...list.querySelectorAll("summary")];
  if (lost && !lost.isConnected && heads.length) heads[0].focus(); // its request has ended
  const now = heads.find((s) => s === document.activeElement) || heads[0]; // Tab leads to the newest
  for (const s of heads) s.tabIndex = s === now ? 0 : -1; // one stop for the list: step goes through it
  return scale;
}

function card(name, title, requests, most, shown) {
  $(name + "-card").hidden = !shown;
  if (!shown) return;
  const scale = rows($(name), requests.slice(0, most));
  const note = requests.length ? "bars to " + (scale < 1000 ? scale + " ms" : scale / 1000 + " s") : "";
  $(name + "-title").replaceChildren(title + " ", el("small", "", note));
  const more = requests.length - most;
  $(name + "-more").textContent = more > 0 ? "and " + more + " more" : requests.length ? "" : "none";
}

function say(text, good) {
  const state = $("state");
  if (state.textContent !== text) state.textContent = text; // a screen reader speaks only of changes
  state.className = good ? "good" : "bad";
}

// draw shows the newest answer, and what is wrong.
function draw() {
  try {
    if (last) paint();
  } catch (e) {
    fault = "the page cannot show the gateway's answer: " + e.message;
  }
  const ready = last && !fault && last.models.every((m) => m.ready);
  const state = fault || (!last ? "…" : last.draining ? "draining" : ready ? "ready" : "not ready");
  say(state + (paused ? ", paused" : ""), state === "ready");
}

function paint() {
  $("time").textContent = clock(last.time) + " UTC";
  const ill = last.models.reduce((n, m) => n + m.endpoints.filter(sick).length, 0);
  $("sick").textContent = ill ? ill + (ill > 1 ? " engines are" : " engine is") + " not well" : "";
  same($("models"), last.models.map(model));
  for (const name of cards.keys()) if (!last.models.some((m) => m.model === name)) cards.delete(name);
  const filter = $("filter").value;
  const running = last.requests.filter((r) => r.running);
  const ended = last.requests.filter((r) => !r.running && (filter !== "failed" || r.error));
  card("running", "In flight", running, filter ? 100 : 6, filter !== "failed");
  card("ended", filter ? "Failed" : "Ended", ended, 60, filter !== "running");
}

// load returns the gateway's answer. The error says what is wrong.
async function load() {
  let response;
  try {
    response = await fetch("live.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
  } catch (e) {
    throw new Error("the gateway does not answer: " + e.message);
  }
  try {
    if (response.ok) return await response.json();
  } catch (e) {
    throw new Error("the gateway's answer cannot be read: " + e.message);
  }
  const why = (await response.text().catch(() => "")).trim().slice(0, 200);
  throw new Error("the gateway answers with status " + response.status + (why && ": " + why));
}

async function ask() {
  if (!paused) {
    try {
      last = await load();
      fault = "";
    } catch (e) {
      fault = e.message;
    }
    draw();
  }
  setTimeout(ask, 1000);
}

function pause() {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  draw();
}

// step moves the focus through the rows of a list.
function step(e) {
  const heads = [...e.currentTarget.querySelectorAll("summary")];
  const at = heads.indexOf(document.activeElement);
  if (at < 0) return;
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: heads.length - 1 }[e.key];
  if (e.key === "Escape") heads[at].parentElement.open = false;
  if (to === undefined) return;
  e.preventDefault();
  const next = heads[Math.max(0, Math.min(heads.length - 1, to))];
  heads[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

$("pause").addEventListener("click", pause);
$("filter").addEventListener("change", draw);
for (const list of [$("running"), $("ended")]) list.addEventListener("keydown", step);
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.tagName === "SELECT") return;
  if (e.key === "p") pause();
  if (e.key === "f") {
    e.preventDefault();
    $("filter").focus();
  }
});
ask();
