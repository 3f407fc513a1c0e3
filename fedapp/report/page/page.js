"use strict";
// Names of runs, devices and metrics, and log lines, are anybody's text: they go in as textContent, and through
// plain() where Plotly would read tags in them.
(() => {
  const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A"];
  // The words of the PNGs (fedapp.report.recorded.AXES), and wall time, which these don't have.
  const AXES = { aggregation: "aggregations", time: "virtual time", "wall-seconds": "wall time, seconds",
    bytes: "MB sent, up and down" };
  const OUTCOMES = { accepted: COLORS[0], late: COLORS[4], failed: COLORS[1], refused: COLORS[3], discarded: COLORS[7],
    lost: COLORS[6], "under way": COLORS[5] };
  const MARKS = { accepted: "line-ns-open", late: "triangle-right", failed: "square", refused: "diamond",
    discarded: "triangle-down", lost: "x", "under way": "y-right-open" };
  const STATES = { working: COLORS[0], receiving: COLORS[5], sending: "#44AA99", waiting: "rgba(128,128,128,0.15)",
    away: "#8C8C8C" };
  const SIGNS = { circle: "●", square: "■", "triangle-up": "▲", diamond: "◆", "triangle-down": "▼", cross: "✚", x: "✖",
    "triangle-left": "◀", "triangle-right": "▶", pentagon: "⬟", hexagon: "⬢", star: "★" };
  const hidden = new Set();
  let content = window.content;
  const chosen = { axis: content.axis, metric: null, run: null, state: null, single: false, equal: false };

  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const shown = () => content.runs.filter((run) => !hidden.has(run.name));
  // Runs that differ in their seed alone are one setting, with one look.
  const grouped = () => content.settings.some((setting) => setting.seeds > 1);
  const settings = () => content.settings.filter((setting) => setting.runs.some((name) => !hidden.has(name)));
  const look = (run) => ((grouped() && content.settings.find((setting) => setting.runs.includes(run.name))) || run).look;
  const lined = ({ color, dash }, width) => ({ color, dash, width });
  const marked = ({ color, symbol, marks }, more = {}) => ({ size: 6, color, symbol, maxdisplayed: marks, ...more });
  const number = (value) => typeof value !== "number" ? String(value ?? "–")
    : Number.isInteger(value) ? String(value) : Number(value.toPrecision(5)).toString();

  function layout(x, y, more = {}) {
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
    return { margin: { l: 55, r: 15, t: 12, b: 45 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" }, showlegend: false,
      hoverlabel: { namelength: 40 }, uirevision: "kept", ...more,
      xaxis: { ...axis, title: { text: plain(x) }, ...more.xaxis },
      yaxis: { ...axis, title: { text: plain(y) }, ...more.yaxis } };
  }

  // A chart has a place of its own from when it is first drawn, so that zoom stays while a run goes on.
  function chart(section, id, title, traces, form, kind = "chart") {
    let box = document.getElementById(id);
    const save = make("button", "PNG", { type: "button", class: "png", title: "save this chart as a PNG" });
    // A picture stands alone: with its title, its ground, and what the colours are.
    save.addEventListener("click", () => Plotly.downloadImage({ data: traces, layout: { ...form, title: { text: plain(title) },
      margin: { ...form.margin, t: 60 }, paper_bgcolor: css("--ground"), showlegend: traces.length > 1 } },
    { format: "png", width: 1200, height: 600, scale: 2, filename: id }));
    if (!box) {
      box = make("div", null, { id, class: kind });
      box.append(make("h3"), make("div", null, { class: "plot" }));
      section.append(box);
    }
    box.firstChild.replaceChildren(make("span", title), save);
    box.dataset.used = "yes";
    Plotly.react(box.lastChild, traces, form, { responsive: true, displayModeBar: false });
  }

  function section(id, title) {
    let node = document.getElementById(id);
    if (!node) {
      node = make("section", null, { id });
      node.append(make("h2", title), make("div", null, { class: "tools" }), make("div", null, { class: "charts" }));
      document.getElementById("main").append(node);
    }
    node.querySelectorAll(".chart").forEach((box) => { box.dataset.used = ""; });
    return node.querySelector(".charts");
  }

  function sweep(charts) {
    charts.querySelectorAll(".chart").forEach((box) => {
      if (!box.dataset.used) { Plotly.purge(box.lastChild); box.remove(); }
    });
    charts.parentNode.hidden = !charts.children.length;
  }

  function pick(charts, name, label, options, value, onChange) {
    const tools = charts.parentNode.querySelector(".tools");
    let select = tools.querySelector(`select[name="${name}"]`);
    if (!select) {
      const holder = make("label", `${label} `);
      select = make("select", null, { name });
      select.addEventListener("change", () => { onChange(select.value); draw(); });
      holder.append(select);
      tools.append(holder);
    }
    const key = JSON.stringify(options);
    if (select.dataset.options !== key) {
      select.dataset.options = key;
      select.replaceChildren(...options.map(([code, text]) => { const o = make("option", text); o.value = code; return o; }));
    }
    select.value = value;
  }

  function axisOf(run) {
    const columns = run.curves.columns || {};
    if (chosen.axis !== "bytes") return columns[chosen.axis];
    const up = columns["bytes-up"], down = columns["bytes-down"];
    return up && down && up.map((value, at) => (value + down[at]) / 1e6);
  }

  function tick(charts, name, label, value, onChange) {
    const tools = charts.parentNode.querySelector(".tools");
    if (tools.querySelector(`input[name="${name}"]`)) return;
    const holder = make("label"), box = make("input", null, { type: "checkbox", name });
    box.checked = value;
    box.addEventListener("change", () => { onChange(box.checked); draw(); });
    holder.append(box, ` ${label}`);
    tools.append(holder);
  }

  // The mean over a setting's seeds as a line, and one standard deviation to both sides of it.
  function bands(key) {
    return settings().flatMap((setting) => {
      const band = (setting.bands[key] || {})[chosen.axis];
      if (!band) return [];
      const own = setting.look, { color } = own, [x, mean, spread] = band;
      const edge = (sign) => mean.map((value, at) => value === null ? null : value + sign * (spread[at] || 0));
      const side = (y, more) => ({ x, y, type: "scatter", mode: "lines", line: { width: 0, color }, hoverinfo: "skip",
        showlegend: false, ...more });
      return [side(edge(-1)), side(edge(1), { fill: "tonexty", fillcolor: `${color}26` }),
        { x, y: mean, name: plain(`${setting.name}, ${setting.seeds} seeds`), type: "scatter", mode: "lines+markers",
          line: lined(own, 2.5), marker: marked(own), customdata: spread, hovertemplate: "%{x:.6~g}: %{y:.5~g} ± %{customdata:.2~g}" }];
    });
  }

  // Says what lines and bands are, where settings have several seeds.
  function banded(charts) {
    const seeds = [...new Set(settings().map((setting) => setting.seeds).filter((number) => number > 1))].sort((a, b) => a - b);
    const text = seeds.length ? `Lines and bands: mean ± 1 s.d. of ${seeds.join(" or ")} seeds.` : "";
    const said = charts.parentNode.querySelector("p") || charts.parentNode.insertBefore(make("p"), charts);
    said.textContent = text;
    said.hidden = !text;
  }

  function curves() {
    const charts = section("curves", "Curves");
    if (grouped()) tick(charts, "single", "single runs", chosen.single, (value) => { chosen.single = value; });
    banded(charts);
    pick(charts, "axis", "over", Object.entries(AXES), chosen.axis, (value) => { chosen.axis = value; });
    const keys = [...new Set(content.runs.flatMap((run) => Object.keys(run.curves.columns || {})))].sort();
    const metrics = keys.filter((key) => !(key in AXES));
    const first = [...content.scores, ...content.scores.map((key) => `client-${key}-worst-tenth`),
      ...content.scores.map((key) => `personal-${key}-mean`), "staleness-mean"];
    const rest = metrics.filter((key) => !first.includes(key));
    if (!metrics.includes(chosen.metric)) chosen.metric = rest.includes("train-loss") ? "train-loss" : rest[0];
    pick(charts, "metric", "one more", metrics.map((key) => [key, key]), chosen.metric, (value) => { chosen.metric = value; });
    const clocks = new Set(shown().map((run) => run.curves.clock));
    const names = { ...AXES, time: clocks.size > 1 ? "time of each run's clock" :
      clocks.has("virtual") ? AXES.time : "seconds" };
    const drawn = first.filter((key) => metrics.includes(key)).map((key) => [`curve-${key}`, key]);
    if (chosen.metric) drawn.push(["curve-chosen", chosen.metric]);
    for (const [id, key] of drawn) {
      const means = bands(key), averaged = new Set(means.length ? content.settings.flatMap((setting) =>
        (setting.bands[key] || {})[chosen.axis] ? setting.runs : []) : []);
      const singles = shown().filter((run) => (run.curves.columns || {})[key] && axisOf(run))
        .filter((run) => chosen.single || !averaged.has(run.name)).map((run) => ({
          x: axisOf(run), y: run.curves.columns[key], name: plain(run.name), type: "scatter",
          mode: means.length ? "lines" : "lines+markers",
          line: lined(look(run), averaged.has(run.name) ? 1 : 2), opacity: averaged.has(run.name) ? 0.5 : 1,
          marker: marked(look(run)), hovertemplate: "%{x:.6~g}: %{y:.5~g}" }));
      const traces = [...means, ...singles];
      const form = layout(names[chosen.axis], key, { hovermode: shown().length > 12 ? "closest" : "x unified" });
      if (!traces.length) form.annotations = [{ text: "none of these runs has it", showarrow: false, xref: "paper",
        yref: "paper", x: 0.5, y: 0.5 }];
      chart(charts, id, titled(key), traces, form);
    }
    const score = content.scores.find((key) => key !== "loss") || "loss";
    everyone(charts, score);
    sweep(charts);
  }

  // On which rows of clients the metrics of each client are measured.
  const rowsOf = (runs) => [...new Set(runs.map((run) => (run.clients || {}).rows).filter(Boolean))].sort()
    .map((rows) => rows === "train" ? "training" : rows).join(" or ");
  const titled = (key) => /^(client|personal)-/.test(key) && rowsOf(shown()) ? `${key} (${rowsOf(shown())} rows)` : key;

  // A score of each client, from the worst to the best, of all runs: of the global model, and dotted of their own models.
  // Clients are sorted from the lowest value where it isn't known which values are better.
  function everyone(charts, metric) {
    const traces = shown().flatMap((run) => [metric, `personal-${metric}`].flatMap((key) => {
      const clients = run.clients || {}, values = ((clients.columns || {})[key] || []).filter((value) => value !== null);
      if (!values.length) return [];
      values.sort((a, b) => clients.costs.includes(key) ? b - a : a - b);
      const own = key !== metric;
      return [{ x: values.map((_, at) => 100 * (at + 0.5) / values.length), y: values, type: "scatter",
        name: plain(own ? `${run.name}, own models` : run.name), mode: values.length <= 40 ? "lines+markers" : "lines",
        line: { ...lined(look(run), 2), ...(own ? { dash: "dot" } : {}) },
        marker: marked(look(run), { symbol: look(run).symbol + (own ? "-open" : ""), maxdisplayed: 0 }),
        hovertemplate: "%{x:.3~g} % of clients: %{y:.5~g}" }];
    }));
    const unknown = shown().some((run) => run.clients && (run.clients.unknown || []).includes(metric));
    const order = unknown ? "from the lowest to the highest" : "from the worst to the best";
    if (traces.length) chart(charts, "everyone", `${metric} on each client's ${rowsOf(shown())} rows in the end, ${order}`, traces,
      layout("share of the clients, %", metric));
  }

  // Few clients stand on an axis by their names.
  const byName = (clients) => clients.names.length && clients.names.length <= 30 ?
    { tickvals: clients.index, ticktext: clients.index.map((index, at) => plain(clients.names[at] || index)) } : {};
  const clientOf = (clients, at) => plain(clients.names[at] ? `${clients.index[at]} ${clients.names[at]}` : clients.index[at]);

  // Columns of the chosen run's clients, sorted from worst to best; ⌈C/10⌉ are the worst tenth.
  function sorted(charts, run, metric) {
    const clients = run.clients, values = clients.columns[metric];
    const cost = clients.costs.includes(metric), first = clients.unknown.includes(metric) ? "lowest" : "worst";
    const order = values.map((_, at) => at).filter((at) => values[at] !== null)
      .sort((a, b) => cost ? values[b] - values[a] : values[a] - values[b]);
    const tenth = Math.ceil(order.length / 10);
    const part = (from, to, name, color, symbol) => ({ x: order.slice(from, to).map((_, at) => from + at + 1),
      y: order.slice(from, to).map((at) => values[at]), text: order.slice(from, to).map((at) => clientOf(clients, at)),
      name, type: "scatter", mode: "markers", marker: { color, symbol, size: order.length > 300 ? 4 : 8 },
      hovertemplate: "client %{text}<br>%{y:.5~g}<extra></extra>" });
    chart(charts, `clients-${metric}`, `${metric} on each client's ${rowsOf([run])} rows, ${first} first (aggregation ${clients.since[metric]})`,
      [part(0, tenth, `${first} tenth`, COLORS[1], "diamond"), part(tenth, order.length, "the others", COLORS[0], "circle")],
      layout("rank", metric, { showlegend: true, legend: { orientation: "h", y: 1.08 } }));
  }

  // What states are called: of devices the server knows when it handed out a task and when the reply was there.
  function called(run, wall) {
    const { parts, absences } = run.tasks, whole = wall ? "at the client" : "at work";
    return { working: parts && !wall ? "working" : whole, receiving: "receiving the model", sending: "sending the update",
      waiting: wall ? "without a task" : absences ? "waiting" : "waiting, or away (not on record)", away: "away" };
  }

  // Every task of few clients as bars, one for each part, in the run's time or, where the curves are over it, in wall time.
  function bars(run, wall, form) {
    const at = new Map(run.tasks.clients.map((index, row) => [index, row]));
    const names = new Map((run.clients.index || []).map((index, place) => [index, clientOf(run.clients, place)]));
    const name = (index) => names.get(index) || String(index);
    const width = Math.max(3, Math.min(16, 200 / at.size));
    const spans = Object.entries(run.tasks.spans).map(([outcome, span]) => ({ outcome, client: span.client,
      began: wall ? span["wall-began"] : span.began, ended: wall ? span["wall-ended"] : span.ended,
      receiving: wall ? null : span.receiving, sending: wall ? null : span.sending }));
    const states = called(run, wall), pieces = { away: [], receiving: [], working: [], sending: [] };
    if (!wall) run.tasks.away.client.forEach((index, place) => pieces.away.push([index, run.tasks.away.began[place],
      run.tasks.away.ended[place], "away"]));
    for (const span of spans) span.client.forEach((index, task) => {
      const from = span.began[task], to = span.ended[task];
      const there = from + (span.receiving ? span.receiving[task] : 0);
      const done = Math.max(there, to - (span.sending ? span.sending[task] : 0));
      const text = `${plain(span.outcome)}, ${number(from)} to ${number(to)}`;
      if (there > from) pieces.receiving.push([index, from, there, text]);
      if (done > there) pieces.working.push([index, there, done, text]);
      if (to > done) pieces.sending.push([index, done, to, text]);
    });
    const traces = Object.entries(pieces).filter(([, all]) => all.length).map(([state, all]) => {
      const text = all.map(([index, from, to, task]) => `client ${name(index)}: ${states[state]}, ` +
        `${number(from)} to ${number(to)}` + (state === "away" ? "" : `<br>task: ${task}`));
      return { name: states[state], type: "scatter", mode: "lines", hoverinfo: "text",
        x: all.flatMap(([, from, to]) => [from, to, null]),
        y: all.flatMap(([index]) => [at.get(index), at.get(index), null]),
        text: text.flatMap((each) => [each, each, null]), line: { color: STATES[state], width } };
    });
    for (const span of spans) traces.push({ name: `ends: ${plain(span.outcome)}`, type: "scatter", mode: "markers",
      x: span.ended, y: span.client.map((index) => at.get(index)), hoverinfo: "skip",
      marker: { symbol: MARKS[span.outcome], color: span.outcome === "accepted" ? css("--ink") : OUTCOMES[span.outcome],
        size: span.outcome === "accepted" ? width : 8, line: { width: 1, color: span.outcome in { accepted: 1, "under way": 1 } ?
          css("--ink") : css("--ground") } } });
    const step = Math.ceil(at.size / 25);
    const rows = run.tasks.clients.filter((_, row) => row % step === 0);
    const cut = (text) => plain(text.length > 14 ? `${text.slice(0, 13)}…` : text);
    form.yaxis = { tickvals: rows.map((index) => at.get(index)), ticktext: rows.map((index) => cut(name(index))),
      autorange: "reversed", showgrid: false, zeroline: false, automargin: false };
    return traces;
  }

  // Of many clients the share of time in the state that is chosen; waiting is what is left.
  function shares(run, wall, state, scale, bar) {
    const { clients, mean, ...clocks } = run.tasks.shares;
    const { edges, ...known } = clocks[wall ? "wall-seconds" : "time"] || Object.values(clocks)[0];
    const all = Object.entries(known), work = all.filter(([key]) => key !== "away");
    const added = (kinds) => known.working.map((row, line) => row.map((_, bin) =>
      kinds.reduce((sum, [, rows]) => sum + rows[line][bin], 0)));
    const z = state === "at work" ? added(work) : state === "waiting" ?
      added(all).map((row) => row.map((value) => Math.max(0, 1 - value))) : known[state];
    const text = z.map((row, line) => row.map(() => `${clients[line]} clients, mean task ${number(mean[line])}`));
    return [{ type: "heatmap", x: edges, z, text, zmin: 0, zmax: 1, colorscale: scale, colorbar: bar,
      hovertemplate: `%{text}<br>%{x:.5~g}: ${state} %{z:.0%}<extra></extra>` }];
  }

  // The share in each bin of time, as steps: each begins at its bin's left edge, and the last one ends at its right.
  function fleet(charts, run, wall, time, alike) {
    const { edges, ...known } = run.tasks.fleet[wall ? "wall-seconds" : "time"], names = called(run, wall);
    if (!edges) return;
    const traces = Object.keys(STATES).filter((state) => known[state]).map((state) => ({ name: names[state], type: "scatter",
      mode: "lines", stackgroup: "all", x: edges, y: [...known[state], known[state].at(-1)],
      line: { width: 0, shape: "hv", color: STATES[state] },
      fillcolor: STATES[state], hovertemplate: "%{y:.1%}" }));
    chart(charts, "fleet", "share of the clients in each state", traces, layout(time, "clients", { hovermode: "x unified",
      showlegend: true, legend: { orientation: "h", y: 1.12, traceorder: "normal" }, ...alike,
      yaxis: { tickformat: ".0%", range: [0, 1], automargin: false } }), "chart broad");
  }

  function tasks(charts, run, scale, bar) {
    const wall = chosen.axis === "wall-seconds" || run.curves.clock === "wall";
    const many = Boolean(run.tasks.shares), form = {}, time = wall ? AXES["wall-seconds"] : "virtual time, seconds";
    // One above the other: the same stretch of time, as wide and as far from the left.
    const { edges } = run.tasks.fleet[wall ? "wall-seconds" : "time"];
    const alike = edges ? { margin: { l: 110, r: 110, t: 12, b: 45 }, xaxis: { range: [edges[0], edges.at(-1)] } } : {};
    fleet(charts, run, wall, time, alike);
    const clock = many ? run.tasks.shares[wall ? "wall-seconds" : "time"] || {} : {};
    const kinds = ["at work", ...Object.keys(STATES).filter((state) => state === "waiting" || clock[state])];
    if (!kinds.includes(chosen.state)) chosen.state = kinds[0];
    if (many) pick(charts, "state", "time of many clients", kinds.map((kind) => [kind, kind]), chosen.state,
      (value) => { chosen.state = value; });
    const traces = many ? shares(run, wall, chosen.state, scale, bar) : bars(run, wall, form);
    chart(charts, "tasks", many ? `share of time ${chosen.state}, fastest clients first` : "what each client did, and how " +
      `its tasks ended; gaps: ${called(run, wall).waiting}`, traces, layout(time, many ? "clients, by speed" : "client", many ?
        { ...alike, yaxis: { autorange: "reversed", showticklabels: false, automargin: false } } :
        { ...alike, ...form, hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.08 } }), "chart broad");
  }

  function details() {
    const run = content.runs.find((each) => each.name === chosen.run) || content.runs[0];
    chosen.run = run.name;
    const charts = section("details", "One run");
    pick(charts, "run", "run", content.runs.map((each) => [each.name, each.name]), run.name,
      (value) => { chosen.run = value; });
    const clients = run.clients, graph = run.graph, partition = run.partition;
    if (clients.columns) {
      clients.metrics.slice(0, 4).forEach((metric) => sorted(charts, run, metric));
      const kinds = [["weight", "asked for", "circle"], ["expected", "expected", "x"], ["observed", "observed", "triangle-up"]];
      const traces = kinds.filter(([key]) => clients.columns[key]).map(([key, name, symbol], at) => ({
        x: clients.index, y: clients.columns[key], name, type: "scatter", mode: "markers",
        text: clients.index.map((_, place) => clientOf(clients, place)),
        marker: { symbol, size: clients.index.length > 300 ? 4 : 8, color: COLORS[at] },
        hovertemplate: "client %{text}<br>%{y:.4~g}" }));
      if (traces.length) chart(charts, "weights", "share of each client: asked for, expected, observed", traces,
        layout("client", "share", { showlegend: true, legend: { orientation: "h", y: 1.08 }, xaxis: byName(clients) }));
      if (clients.columns.work) chart(charts, "work", "contributions of each client", [{ x: clients.index,
        y: clients.columns.work, text: clients.index.map((_, place) => clientOf(clients, place)), type: "bar",
        textposition: "none", marker: { color: COLORS[0] }, hovertemplate: "client %{text}<br>%{y}<extra></extra>" }],
        layout("client", "contributions", { xaxis: byName(clients) }));
    }
    const scale = [[0, css("--ground")], [1, COLORS[0]]];
    const bar = { thickness: 12, outlinewidth: 0 };
    const named = (names) => names && names.length ? names.map(plain) : undefined;
    const owners = named(partition.names) || partition.index, classes = named(partition.classes);
    if (run.tasks.spans || run.tasks.shares) tasks(charts, run, scale, bar);
    if (partition.counts) chart(charts, "partition", "examples by client and class", [{ type: "heatmap",
      z: partition.counts, x: owners, y: classes, colorscale: scale, colorbar: bar,
      hovertemplate: "client %{x}, class %{y}: %{z}<extra></extra>" }], layout("client", "class", {
        xaxis: partition.names.length ? { type: "category" } : {},
        yaxis: classes ? { type: "category" } : { tick0: 0, dtick: Math.ceil(partition.counts.length / 20) } }));
    else if (partition.sizes) chart(charts, "partition", "examples of each client", [{ type: "bar", x: owners,
      y: partition.sizes, marker: { color: COLORS[0] } }], layout("client", "examples",
        partition.names.length ? { xaxis: { type: "category" } } : {}));
    if (graph.index) {
      const names = graph.index.map(String);
      chart(charts, "graph", "misalignment of clients", [{ type: "heatmap", z: graph.misalignment, x: names, y: names,
        colorscale: scale, colorbar: bar, hovertemplate: "%{x}, %{y}: %{z}<extra></extra>" }],
        layout("client", "client", { xaxis: { type: "category" }, yaxis: { type: "category", autorange: "reversed" } }));
      chart(charts, "spectrum", "spectrum of the graph's Laplacian", [{ type: "scatter", mode: "markers", x: graph.rank,
        y: graph.eigenvalues, marker: { color: COLORS[0], size: 5 }, hovertemplate: "%{x}: %{y:.5~g}<extra></extra>" }],
        layout("rank", "eigenvalue"));
    }
    sweep(charts);
    charts.parentNode.hidden = false;
  }

  function block(id, title, first = false) {
    let node = document.getElementById(id);
    if (!node) {
      node = make("section", null, { id });
      document.getElementById("main")[first ? "prepend" : "append"](node);
    }
    node.replaceChildren(make("h2", title));
    return node;
  }

  function table(head, rows, differing) {
    const node = make("table"), top = make("tr"), body = make("tbody"), first = make("thead");
    head.forEach((text) => top.append(make("th", text, { scope: "col" })));
    first.append(top);
    rows.forEach((cells, at) => {
      const row = make("tr", null, differing && differing[at] ? { class: "differs" } : {});
      cells.forEach((cell, place) => row.append(place ? make("td", cell) : make("th", cell, { scope: "row" })));
      body.append(row);
    });
    node.append(first, body);
    const wide = make("div", null, { class: "wide" });
    wide.append(node);
    return wide;
  }

  function writing() {
    const run = content.runs.find((each) => each.name === chosen.run);
    const log = block("log", `Log of ${run.name}`);
    log.append(run.log.length ? make("pre", run.log.join("\n")) : make("p", "This run has no log.txt."));
  }

  // Which setting leads, what may spoil that, and what each setting takes to reach the target.
  function verdict() {
    const node = document.getElementById("verdict"), found = content.verdict;
    node.hidden = !found;
    if (!found) return;
    node.replaceChildren(make("h2", "Verdict"), ...found.sentences.map((text) => make("p", text, { class: "said" })),
      ...found.doubts.map((text) => make("p", `Caution: ${text}`)));
    if (found.costs.length) node.append(table(["setting", found.metric, `time to ${number(found.target)}`, "sent", "on the server",
      "seeds that keep it"], found.costs.map((each) => [each.leads ? `${each.name} (leads)` : each.name, each.mean,
      each.time, each.bytes, each.server, each.reached])));
    node.append(make("p", `Numbers: ${found.files}`));
  }

  // Two settings beside each other: what differs, the scores of both, and by how much.
  function duel() {
    const pair = settings(), here = document.getElementById("two");
    if (here) here.hidden = pair.length !== 2;
    if (pair.length !== 2) return;
    const node = block("two", pair.map((setting) => setting.name).join(" and "), true);
    const difference = (key) => {
      const [a, b] = pair.map((setting) => setting.means[key]);
      return a === null || b === null ? "–" : `${b < a ? "−" : "+"}${Math.abs(b - a).toFixed(content.digits)}`;
    };
    const keys = content.scores.filter((key) => pair.some((setting) => setting.means[key] !== null));
    node.append(table([content.place, ...pair.map((setting) => setting.name), "difference"],
      [["seeds", ...pair.map((setting) => setting.of), ""],
        ...keys.map((key) => [key, ...pair.map((setting) => setting.scores[key]), difference(key)])]));
  }

  function tables() {
    const runs = shown();
    const ends = block("ends", "How the runs stand");
    if (grouped()) ends.append(make("p", `Mean ± standard deviation over the seeds, ${content.place}.`),
      table(["setting", "seeds", ...content.scores], settings().map((setting) => [setting.name, setting.of,
        ...content.scores.map((key) => setting.scores[key])])));
    const keys = ["status", "reason", "warnings", "strategy", "engine", "aggregations", "best-aggregation",
      ...content.scores.filter((key) => key !== "loss").flatMap((key) => [key, `client-${key}-worst-tenth`]),
      "loss", "wall-seconds", "bytes-up", "bytes-down", "failures"].filter((key) => runs.some((run) => key in run.summary));
    const single = table(["run", ...keys.map(titled)], runs.map((run) => [run.name, ...keys.map((key) => number(run.summary[key]))]));
    if (grouped()) {
      const more = make("details", null, chosen.single ? { open: "" } : {});
      more.append(make("summary", "single runs"), single);
      ends.append(more);
    } else ends.append(single);
    const config = block("config", "Config");
    const all = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
    const cell = (run, key) => key in run.config ? String(run.config[key]) : "–";
    // Keys such as run-name, which say where and how a run is recorded, differ without the runs' differing in them.
    const differs = (key) => !content.places.includes(key) && new Set(runs.map((run) => cell(run, key))).size > 1;
    const order = [...all.filter(differs), ...all.filter((key) => !differs(key))];
    const many = runs.length > 1 && all.some(differs);
    const listed = many && !chosen.equal ? order.filter(differs) : order;
    if (many) {
      const alike = make("button", chosen.equal ? "hide the other keys" : `show the ${all.length - order.filter(differs).length} ` +
        "other keys", { type: "button", id: "alike", "aria-pressed": chosen.equal });
      alike.addEventListener("click", () => { chosen.equal = !chosen.equal; tables(); });
      config.append(alike);
    } else config.append(make("p", runs.length > 1 ? "All are alike." : ""));
    config.append(table(["key", ...runs.map((run) => run.name)], listed.map((key) => [key, ...runs.map((run) => cell(run, key))]),
      listed.map((key) => many && differs(key))));
  }

  function chips() {
    const nav = document.getElementById("runs");
    const button = (text, pressed, onClick) => {
      const node = make("button", null, pressed === null ? { type: "button" } : { type: "button", "aria-pressed": pressed });
      node.append(make("span", text, { title: text }));
      node.addEventListener("click", onClick);
      return node;
    };
    const all_of = grouped() ? content.settings.map((setting) => [setting.name, setting.runs, setting.look])
      : content.runs.map((run) => [run.name, [run.name], look(run)]);
    const toggles = all_of.map(([name, members, { color, dash, symbol }]) => {
      const seen = members.some((each) => !hidden.has(each));
      const node = button(name, seen, () => {
        members.forEach((each) => { if (seen) hidden.add(each); else hidden.delete(each); });
        draw();
      });
      const swatch = make("span", null, { class: "swatch", "data-sign": SIGNS[symbol] });
      swatch.style.color = color;
      swatch.style.borderColor = color;
      swatch.style.borderTopStyle = dash === "solid" ? "solid" : dash === "dot" ? "dotted" : "dashed";
      node.prepend(swatch);
      return node;
    });
    const all = content.runs.length > 1 ? [button("all", null, () => { hidden.clear(); draw(); }),
      button("none", null, () => { content.runs.forEach((run) => hidden.add(run.name)); draw(); })] : [];
    nav.replaceChildren(...all, ...toggles);
  }

  function notes() {
    const foot = document.getElementById("left-out");
    const lines = [...content.left_out, ...content.runs.flatMap((run) => run.left_out.map((text) => `${run.name}: ${text}`))];
    foot.replaceChildren(...(lines.length ? [make("h2", "Left out")] : []), ...lines.map((line) => make("p", line)));
    const running = content.runs.filter((run) => run.summary.status === "running").length;
    document.getElementById("standing").textContent = `${content.runs.length} ${content.runs.length === 1 ? "run" : "runs"}` +
      (running ? `, ${running} going on` : "") + (content.live ? "; this page follows" : "");
  }

  function draw() {
    chips();
    notes();
    verdict();
    duel();
    curves();
    details();
    tables();
    writing();
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }

  let tag = "";
  async function follow() {
    try {
      const answer = await fetch("content.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.ok) {
        tag = answer.headers.get("ETag") || "";
        content = await answer.json();
        draw();
      } else if (answer.status === 304) notes(); // after a poll that failed: it is followed again
      else throw new Error(String(answer.status));
    } catch (error) {
      document.getElementById("standing").textContent = `not followed any more: ${error.message}`;
    }
    setTimeout(follow, 2000);
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // On paper charts are as wide as its columns.
  matchMedia("print").addEventListener("change", () => document.querySelectorAll(".plot").forEach((plot) => {
    Plotly.relayout(plot, { width: plot.clientWidth, height: plot.clientHeight });
  }));
  if (content.live) setTimeout(follow, 2000);
})();
