// The page of `lowtide ui`. All text from the server goes into text nodes and attributes, never into markup.

const main = document.getElementById("main");
const fleet = { rows: new Map(), now: 0, skew: 0, currency: "USD", trend: [], problems: {}, problem: "" };
let page = null; // the page that is shown: { update(), leave() }

// ---- building elements

function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function show(title, ...children) {
  document.title = `${title} · lowtide`;
  main.replaceChildren(...children.filter(Boolean));
}

function notice(text, bad = false) {
  const shown = h("div", { class: bad ? "notice bad" : "notice" }, text);
  document.getElementById("notices").append(shown);
  setTimeout(() => shown.remove(), bad ? 10000 : 5000);
}

// ---- words

function duration(seconds) {
  const whole = Math.max(0, seconds);
  if (whole < 120) return `${Math.floor(whole)} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h`;
  return `${Math.floor(whole / 86400)} d`;
}
const now = () => Date.now() / 1000 + fleet.skew;
const age = (row) => (row.created_at ? duration(now() - row.created_at) : "–");
const ends = (row) => (!row.ends_at ? "–" : row.ends_at > now() ? `in ${duration(row.ends_at - now())}` : "overdue");
const money = (amount) => (amount === null || amount === undefined ? "–" : `${amount.toFixed(amount < 1 ? 4 : 2)} ${fleet.currency}`);
const short = (id) => (id.length > 14 ? `…${id.slice(-12)}` : id);
const address = (row) => `#/sandbox/${encodeURIComponent(row.provider)}/${encodeURIComponent(row.id)}`;
const bytes = (size) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024 || unit === "GiB") return unit === "B" ? `${size} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
};

// ---- talking to the server

async function api(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error || `the server answered ${response.status}`);
  return answer;
}

function listen() {
  const live = document.getElementById("live");
  const events = new EventSource("/api/events");
  events.onopen = () => { fleet.rows.clear(); live.className = "on"; live.textContent = "live"; };
  events.onerror = () => { live.className = "off"; live.textContent = "disconnected"; };
  events.onmessage = (event) => {
    const state = JSON.parse(event.data);
    for (const key of state.removed) fleet.rows.delete(key);
    for (const row of state.changed) fleet.rows.set(`${row.provider}/${row.id}`, row);
    Object.assign(fleet, { currency: state.currency, trend: state.trend, problems: state.problems, problem: state.problem });
    fleet.skew = state.now - Date.now() / 1000;
    const problems = Object.entries(state.problems).map(([name, why]) => `${name}: ${why}`);
    document.getElementById("problems").textContent = [state.problem, ...problems].filter(Boolean).join("\n");
    page?.update?.();
  };
}

function ask(text, confirm = "Destroy") {
  const dialog = document.getElementById("question");
  document.getElementById("question-text").textContent = text;
  dialog.querySelector(".danger").textContent = confirm;
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function attempt(work, done) {
  try {
    const result = await work();
    if (done) notice(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    notice(error.message, true);
    return null;
  }
}

// ---- overview

function overview() {
  const cards = h("div", { class: "cards" });
  const trend = h("div", { class: "panel" });
  const states = h("div", { class: "panel" });
  const orphans = h("div", { class: "panel" });
  show("Overview", h("h1", {}, "Overview"), cards, h("div", { class: "split" }, trend, states), orphans);
  const card = (value, text, bad) => h("div", { class: bad ? "card bad" : "card" }, h("b", {}, String(value)), h("span", {}, text));
  return {
    update() {
      const rows = [...fleet.rows.values()];
      const open = rows.filter((row) => row.open);
      const dead = open.filter((row) => row.owner_state === "dead");
      const hour = open.reduce((sum, row) => sum + (row.cost || 0), 0);
      cards.replaceChildren(
        card(open.length, "open sandboxes"),
        card(open.filter((row) => row.state === "running").length, "running"),
        card(open.filter((row) => row.kept).length, "kept"),
        card(dead.length, "orphans", dead.length > 0),
        card(money(hour), "spent by open sandboxes"),
      );
      trend.replaceChildren(h("h2", {}, "Open sandboxes"), graph(fleet.trend));
      states.replaceChildren(h("h2", {}, "By provider and state"), counts(rows));
      orphans.hidden = dead.length === 0;
      orphans.replaceChildren(
        h("h2", {}, "Orphans"),
        h("p", {}, "The owners of these sandboxes are dead. The guardian destroys them; ", h("a", { href: "#/sweep" }, "sweep"), " does it now."),
        h("ul", {}, dead.slice(0, 20).map((row) => h("li", {}, h("a", { href: address(row) }, short(row.id)), ` on ${row.provider}, ${age(row)} old`))),
      );
    },
  };
}

function graph(samples) {
  const width = 480, height = 120;
  const most = Math.max(1, ...samples.map(([, count]) => count));
  const begin = samples.length ? samples[0][0] : 0;
  const span = Math.max(1, samples.length ? samples[samples.length - 1][0] - begin : 1);
  const points = samples.map(([at, count]) => `${(((at - begin) / span) * width).toFixed(1)},${(height - (count / most) * (height - 20)).toFixed(1)}`);
  const label = samples.length ? `${samples[samples.length - 1][1]} open now, at most ${most}` : "no samples yet";
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("polygon", { class: "area", points: `0,${height} ${points.join(" ")} ${width},${height}` }),
    svg("polyline", { class: "graph", points: points.join(" ") }),
    svg("text", { x: 4, y: 12 }, document.createTextNode(`most ${most}`)));
}

function counts(rows) {
  const table = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.provider, row.state]);
    table.set(key, (table.get(key) || 0) + 1);
  }
  const lines = [...table].sort().map(([key, count]) => {
    const [provider, state] = JSON.parse(key);
    return h("tr", {}, h("td", {}, provider), h("td", {}, h("span", { class: `state ${state}` }, state)), h("td", { class: "number" }, String(count)));
  });
  return lines.length
    ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "provider"), h("th", {}, "state"), h("th", {}, "count"))), h("tbody", {}, lines))
    : h("p", { class: "soft" }, "No sandboxes.");
}

// ---- the list: only the visible rows are in the document, so that thousands scroll

const COLUMNS = [
  ["id", (row) => row.id], ["provider", (row) => row.provider], ["state", (row) => row.state], ["owner", (row) => row.owner],
  ["age", (row) => row.created_at || 0], ["ends", (row) => row.ends_at || Infinity], ["cost", (row) => -(row.cost || 0)], ["tags", (row) => row.tags.join(" ")],
];
const HEIGHT = 36;
const view = { words: "", sort: "age", reverse: true, ended: false, group: "" };

function sandboxes() {
  const search = h("input", { type: "search", placeholder: "Filter: id, provider, state, owner, tag", "aria-label": "Filter", value: view.words });
  const group = h("select", { "aria-label": "Group by" }, ["", "provider", "owner", "tag"].map((one) => h("option", { value: one }, one ? `by ${one}` : "no groups")));
  const ended = h("input", { type: "checkbox" });
  const count = h("span", { class: "soft", role: "status" });
  const tall = h("div", { class: "tall" });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "rowgroup", "aria-label": "Sandboxes" }, tall);
  const head = h("div", { class: "row head", role: "row" }, COLUMNS.map(([name], place) =>
    h("span", { role: "columnheader", class: wide(place) }, h("button", { type: "button", onclick: () => sortBy(name) }, name))));
  let lines = [];
  group.value = view.group;
  ended.checked = view.ended;
  search.addEventListener("input", () => { view.words = search.value; arrange(); });
  group.addEventListener("change", () => { view.group = group.value; arrange(); });
  ended.addEventListener("change", () => { view.ended = ended.checked; arrange(); });
  scroll.addEventListener("scroll", draw);
  addEventListener("resize", draw);
  show("Sandboxes", h("h1", {}, "Sandboxes"),
    h("div", { class: "bar" }, search, group, h("label", {}, ended, " ended too"), count),
    h("div", { class: "list", role: "table", "aria-label": "Sandboxes" }, head, scroll));

  function sortBy(name) {
    if (view.sort === name) view.reverse = !view.reverse;
    else Object.assign(view, { sort: name, reverse: false });
    arrange();
  }

  function arrange() {
    const words = view.words.toLowerCase().split(/\s+/).filter(Boolean);
    const key = COLUMNS.find(([name]) => name === view.sort)[1];
    const found = [...fleet.rows.values()].filter((row) => {
      if (!view.ended && !row.open) return false;
      const text = [row.id, row.provider, row.state, row.owner, ...row.tags].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.id < b.id ? -1 : 1) * (view.reverse ? -1 : 1));
    count.textContent = `${found.length} shown`;
    lines = view.group ? grouped(found) : found;
    head.querySelectorAll("[role=columnheader]").forEach((cell, place) => {
      const sorted = COLUMNS[place][0] === view.sort;
      cell.setAttribute("aria-sort", sorted ? (view.reverse ? "descending" : "ascending") : "none");
    });
    tall.style.height = `${lines.length * HEIGHT}px`;
    draw();
  }

  function grouped(found) {
    const groups = new Map();
    for (const row of found) {
      const names = view.group === "tag" ? (row.tags.length ? row.tags : ["no tag"]) : [row[view.group]];
      for (const name of names) groups.set(name, [...(groups.get(name) || []), row]);
    }
    return [...groups].sort(([a], [b]) => (a < b ? -1 : 1)).flatMap(([name, rows]) => [{ head: `${name} (${rows.length})` }, ...rows]);
  }

  function draw() {
    const first = Math.max(0, Math.floor(scroll.scrollTop / HEIGHT) - 5);
    const last = Math.min(lines.length, first + Math.ceil(scroll.clientHeight / HEIGHT) + 10);
    const focused = document.activeElement?.dataset?.key;
    tall.replaceChildren(...lines.slice(first, last).map((row, place) => line(row, first + place)));
    if (focused) tall.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function line(row, place) {
    if (row.head) {
      const shown = h("div", { class: "row head", role: "row" }, h("b", {}, row.head));
      shown.style.top = `${place * HEIGHT}px`;
      return shown;
    }
    const shown = h("a", { class: "row", role: "row", href: address(row), "data-key": `${row.provider}/${row.id}`, "aria-rowindex": String(place + 1), "aria-label": `${row.id} on ${row.provider}, ${row.state}` },
      h("code", { title: row.id }, short(row.id)),
      h("span", { class: "wide" }, row.provider),
      h("span", { class: `state ${row.state}` }, row.state),
      h("span", { class: row.owner_state === "dead" && row.open ? "wide dead" : "wide" }, row.owner),
      h("span", { class: "number" }, age(row)),
      h("span", { class: "number wide" }, ends(row)),
      h("span", { class: "number wide" }, money(row.cost)),
      h("span", { class: "wide" }, row.tags.map((tag) => h("span", { class: "tag" }, tag))));
    shown.style.top = `${place * HEIGHT}px`;
    return shown;
  }

  return {
    update: arrange,
    leave: () => removeEventListener("resize", draw),
    keys: {
      "/": () => search.focus(),
      ArrowDown: () => step(1), j: () => step(1), ArrowUp: () => step(-1), k: () => step(-1),
    },
  };

  function step(by) {
    const keys = lines.map((row) => (row.head ? null : `${row.provider}/${row.id}`));
    let place = keys.indexOf(document.activeElement?.dataset?.key ?? "");
    do { place += by; } while (place >= 0 && place < keys.length && keys[place] === null);
    if (place < 0 || place >= keys.length) return;
    const top = place * HEIGHT;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + HEIGHT > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + HEIGHT - scroll.clientHeight;
    draw();
    tall.querySelector(`[data-key="${CSS.escape(keys[place])}"]`)?.focus({ preventScroll: true });
  }
}

const wide = (place) => ([0, 2, 4].includes(place) ? "" : "wide");

// ---- one sandbox

function sandbox(provider, id) {
  const base = `/api/sandbox/${encodeURIComponent(provider)}/${encodeURIComponent(id)}`;
  const facts = h("div", { class: "panel" });
  const timeline = h("div", { class: "panel" });
  const inside = h("div", { class: "split" });
  const buttons = h("div", { class: "bar" },
    h("button", { type: "button", onclick: keep }, "Keep for a day"),
    h("button", { type: "button", class: "danger", onclick: stop }, "Destroy"));
  show(short(id), h("h1", {}, h("code", {}, id)), buttons, h("div", { class: "split" }, facts, timeline), inside);
  let entered = false;
  let state = "";

  async function load() {
    const found = await attempt(() => api(base));
    if (!found) return;
    const row = found.row;
    state = JSON.stringify([row.state, row.owner_state, row.reason]);
    const fact = (name, value) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value));
    facts.replaceChildren(h("h2", {}, "Facts"), h("table", {}, h("tbody", {},
      fact("provider", row.provider), fact("state", h("span", { class: `state ${row.state}` }, row.state)), fact("owner", `${row.owner} (${row.owner_state})`),
      fact("age", age(row)), fact("ends", ends(row)), fact("cost so far", money(row.cost)),
      fact("tags", row.tags.length ? h("span", {}, row.tags.map((tag) => h("span", { class: "tag" }, tag))) : "–"), fact("reason", row.reason || "–"))));
    timeline.replaceChildren(h("h2", {}, "Lease"), picture(found.history), history(found.history));
    for (const button of buttons.children) button.disabled = !row.open;
    if (found.can_enter && !entered) {
      entered = true;
      inside.replaceChildren(commands(base), files(base), ports(base), terminal(provider, id));
    } else if (!found.can_enter && entered) {
      entered = false;
      inside.replaceChildren();
    }
  }

  async function stop() {
    const row = fleet.rows.get(`${provider}/${id}`);
    const owner = row?.owner_state === "alive" ? ` Its owner, process ${row.owner}, is alive.` : "";
    if (await ask(`Destroy ${id} on ${provider}?${owner}`)) {
      await attempt(() => api(`${base}/stop`, {}), (report) => `${short(id)}: ${report.outcome.replace("_", " ")}`);
      load();
    }
  }

  async function keep() {
    const row = fleet.rows.get(`${provider}/${id}`);
    const take = row?.owner_state === "alive";
    if (take && !(await ask(`Process ${row.owner} owns ${id}. Take it over and keep it for a day?`, "Take and keep"))) return;
    await attempt(() => api(`${base}/keep`, { take }), `${short(id)} is kept for a day`);
    load();
  }

  load();
  return {
    update() {
      const row = fleet.rows.get(`${provider}/${id}`);
      if (row && JSON.stringify([row.state, row.owner_state, row.reason]) !== state) load();
    },
    keys: { s: stop, k: keep },
  };
}

function picture(lines) {
  const width = 480;
  if (!lines.length) return h("p", { class: "soft" }, "This ledger has no lease for the sandbox.");
  const begin = lines[0].at;
  // The square root leaves room for the first moments, in which most steps lie.
  const span = Math.sqrt(Math.max(1, now() - begin));
  const place = (at) => 10 + (Math.sqrt(Math.max(0, at - begin)) / span) * (width - 20);
  const marks = lines.map((line, number) => svg("g", {},
    svg("circle", { class: "mark", cx: place(line.at), cy: 40, r: 5 }),
    svg("text", { x: place(line.at), y: number % 2 ? 66 : 22, "text-anchor": place(line.at) > width - 60 ? "end" : "start" }, document.createTextNode(line.state))));
  return svg("svg", { viewBox: `0 0 ${width} 76`, role: "img", "aria-label": `Lease: ${lines.map((line) => line.state).join(", ")}` },
    svg("line", { class: "span", x1: 10, x2: width - 10, y1: 40, y2: 40 }), ...marks);
}

const history = (lines) => h("table", {}, h("thead", {}, h("tr", {}, ["since start", "state", "by", "why"].map((one) => h("th", {}, one)))),
  h("tbody", {}, lines.map((line) => h("tr", {}, h("td", { class: "number" }, `+${(line.at - lines[0].at).toFixed(3)} s`), h("td", {}, line.state), h("td", {}, String(line.pid)), h("td", {}, line.why || "–")))));

function commands(base) {
  const input = h("input", { placeholder: "a shell command", "aria-label": "Shell command", autocomplete: "off", name: "command" });
  const list = h("div", { "aria-live": "polite" });
  const form = h("form", { class: "bar" }, input, h("button", {}, "Run"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const command = input.value;
    if (!command.trim()) return;
    input.value = "";
    const outcome = h("span", { class: "soft" }, "running…");
    const entry = h("div", {}, h("p", {}, h("code", {}, command), " ", outcome));
    list.prepend(entry);
    try {
      const result = await api(`${base}/exec`, { command });
      outcome.textContent = `exit ${result.returncode} after ${result.seconds.toFixed(2)} s`;
      outcome.className = result.returncode === 0 ? "soft" : "dead";
      if (result.stdout) entry.append(h("pre", {}, result.stdout));
      if (result.stderr) entry.append(h("pre", { class: "dead" }, result.stderr));
    } catch (error) {
      outcome.textContent = error.message;
      outcome.className = "dead";
    }
  });
  return h("div", { class: "panel" }, h("h2", {}, "Commands"), form, list);
}

function files(base) {
  const where = h("input", { value: "/", "aria-label": "Directory" });
  const list = h("div");
  const preview = h("div", { "aria-live": "polite" });
  const form = h("form", { class: "bar" }, where, h("button", {}, "Open"));
  form.addEventListener("submit", (event) => { event.preventDefault(); open(where.value); });

  let asked = 0; // an answer that comes after a later question is dropped
  async function open(path) {
    const mine = ++asked;
    const found = await attempt(() => api(`${base}/files?path=${encodeURIComponent(path)}`));
    if (!found || mine !== asked) return;
    where.value = path;
    const up = path.replace(/\/+[^/]*\/*$/, "") || "/";
    const entry = (one) => h("tr", {}, h("td", {}, h("button", { type: "button", onclick: () => (one.kind === "directory" ? open(one.path) : look(one)) }, one.name + (one.kind === "directory" ? "/" : ""), one.target ? ` → ${one.target}` : "")),
      h("td", { class: "number" }, one.kind === "file" ? bytes(one.size) : one.kind));
    list.replaceChildren(h("table", {}, h("tbody", {}, path === "/" ? null : entry({ name: "..", path: up, kind: "directory" }), found.entries.map(entry))),
      found.more ? h("p", { class: "soft" }, `${found.more} more entries are not shown`) : "");
  }

  async function look(one) {
    const mine = ++asked;
    const query = `path=${encodeURIComponent(one.path)}`;
    const found = await attempt(() => api(`${base}/file?${query}`));
    if (!found || mine !== asked) return;
    const content = found.image ? h("img", { class: "preview", src: `${base}/image?${query}`, alt: one.name }) : h("pre", {}, found.binary ? "binary file" : found.text);
    preview.replaceChildren(h("p", {}, h("code", {}, one.path), found.more ? " (the beginning)" : ""), content);
  }

  open("/");
  return h("div", { class: "panel" }, h("h2", {}, "Files"), form, list, preview);
}

function ports(base) {
  const input = h("input", { type: "number", min: "1", max: "65535", placeholder: "8000", "aria-label": "Port" });
  const list = h("ul");
  const form = h("form", { class: "bar" }, input, h("button", {}, "Get address"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const port = Number(input.value);
    const found = await attempt(() => api(`${base}/url`, { port }));
    if (found) list.prepend(h("li", {}, `${port}: `, h("a", { href: found.url, rel: "noreferrer noopener", target: "_blank" }, found.url), found.needs_headers.length ? ` (needs ${found.needs_headers.join(", ")})` : ""));
  });
  return h("div", { class: "panel" }, h("h2", {}, "Ports"), form, list);
}

function terminal(provider, id) {
  const panel = h("div", { class: "panel" }, h("h2", {}, "Terminal"));
  const button = h("button", { type: "button" }, "Open a terminal");
  button.addEventListener("click", () => {
    button.replaceWith(h("iframe", { src: `/terminal#${encodeURIComponent(provider)}/${encodeURIComponent(id)}`, title: `Terminal in ${id}` }));
  });
  panel.append(button);
  return panel;
}

// ---- sweep, settings

function sweep() {
  const list = h("div", { class: "panel" }, h("p", {}, "looking…"));
  const button = h("button", { type: "button", class: "danger", disabled: true }, "Destroy the orphans");
  show("Sweep", h("h1", {}, "Sweep"), h("p", { class: "soft" }, "Sandboxes whose owner is proven dead, or whose keep or lifetime is over."), h("div", { class: "bar" }, button), list);
  const table = (findings) => findings.length
    ? h("table", {}, h("thead", {}, h("tr", {}, ["action", "provider", "id", "why"].map((one) => h("th", {}, one)))),
      h("tbody", {}, findings.map((one) => h("tr", {}, h("td", { class: one.action === "failed" ? "dead" : "" }, one.action), h("td", {}, one.provider), h("td", {}, one.id || "–"), h("td", {}, one.why)))))
    : h("p", {}, "Nothing to sweep.");
  async function preview() {
    const found = await attempt(() => api("/api/sweep"));
    if (!found) return;
    const count = found.findings.filter((one) => one.action === "would-end").length;
    button.disabled = count === 0;
    button.textContent = count === 1 ? "Destroy 1 orphan" : `Destroy ${count} orphans`;
    list.replaceChildren(table(found.findings));
  }
  button.addEventListener("click", async () => {
    if (!(await ask(`${button.textContent}?`))) return;
    button.disabled = true;
    const done = await attempt(() => api("/api/sweep", {}), (result) => `${result.findings.filter((one) => one.action === "ended").length} destroyed`);
    if (done) list.replaceChildren(table(done.findings));
    else preview();
  });
  preview();
  return {};
}

function settings() {
  const list = h("div", { class: "panel" }, "reading…");
  const checks = h("div", { class: "panel" }, h("h2", {}, "Doctor"), h("p", { class: "soft" }, "checking this machine…"));
  show("Settings", h("h1", {}, "Settings"), list, checks);
  attempt(() => api("/api/settings")).then((found) => found && list.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ["setting", "value", "from"].map((one) => h("th", {}, one)))),
    h("tbody", {}, found.settings.map((one) => h("tr", {}, h("td", {}, one.key), h("td", {}, one.value === null ? "–" : typeof one.value === "string" ? one.value : JSON.stringify(one.value)), h("td", {}, one.source)))))));
  attempt(() => api("/api/doctor")).then((found) => found && checks.replaceChildren(h("h2", {}, "Doctor"), h("table", {}, h("tbody", {},
    found.findings.map((one) => h("tr", {}, h("td", { class: one.ok ? "state running" : "dead" }, one.ok ? "ok" : "missing"), h("td", {}, `${one.about}: ${one.check}`), h("td", {}, one.why, one.fix ? h("pre", {}, one.fix) : "")))))));
  return {};
}

// ---- routes, keys, theme

function route() {
  page?.leave?.();
  const parts = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const pages = { "": overview, sandboxes, sweep, settings };
  page = parts[0] === "sandbox" && parts.length === 3 ? sandbox(parts[1], parts[2]) : (pages[parts[0]] || overview)();
  page.update?.();
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.getAttribute("href") === (parts[0] === "sandbox" ? "#/sandboxes" : `#/${parts[0]}`);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "Escape" && typing && !document.querySelector("dialog[open]")) { event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = page?.keys?.[event.key];
  if (action) { event.preventDefault(); action(); return; }
  const jump = { 1: "#/", 2: "#/sandboxes", 3: "#/sweep", 4: "#/settings" }[event.key];
  if (jump) location.hash = jump;
});

function theme(value) {
  document.documentElement.dataset.theme = value;
  try { localStorage.setItem("lowtide-theme", value); } catch { /* no storage: for this page only */ }
}
let saved = null;
try { saved = localStorage.getItem("lowtide-theme"); } catch { /* no storage */ }
theme(saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
setInterval(() => page?.update?.(), 5000); // ages go on without a change at the server
route();
listen();
