"use strict";
/* The report page: a chart and a list of plans, one of which is shown below them.
   Texts of the user reach the page as text nodes; plotly's labels are escaped, since it reads tags. */
const drawn = (async () => {
  const data = JSON.parse(await unpacked("data"));
  const KEYS = { state: 0, saved: 1, other: 2, compute: 3, comm: 4 }; // of a module's costs: bytes first
  let chosen = data.chosen;
  const hidden = new Set(); // numbers of devices that are filtered out

  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const deviceCounts = [...new Set([...data.plans.map((p) => p.devices), ...data.rivals.map((r) => r[1])])]
    .sort((a, b) => a - b);
  const seriesColor = (devices) => color(`--axis-${deviceCounts.indexOf(devices) % 5}`);

  /* Every `axis:choice` and every axis of a collective in the color of that axis. */
  function layouts(target, text, axes) {
    const names = axes.map((a) => a.replace(/[^\w]/g, "\\$&")).join("|");
    let end = 0;
    for (const found of text.matchAll(new RegExp(`(?<![\\w.])(${names})(:[^;,\\s]+|(?=[\\s:]|$))`, "g"))) {
      target.append(text.slice(end, found.index));
      target.append(element("span", found[0], { class: `axis axis-${axes.indexOf(found[1]) % 5}` }));
      end = found.index + found[0].length;
    }
    target.append(text.slice(end));
    return target;
  }

  /* ---- the frontier ---- */
  function hover(name, mesh, devices, seconds, bytes, strategy) {
    const words = strategy ? `<br>${escaped(strategy).replace(/(.{1,70})(?:\s|$)/g, "$1<br>")}` : "";
    const where = mesh ? `${escaped(mesh)}, ` : "";
    return `<b>${escaped(name)}</b><br>${where}${devices} device${devices > 1 ? "s" : ""}<br>`
      + `${ms(seconds)} a step, ${size(bytes)} a rank${words}`;
  }
  /* Buttons over a chart come with the pointer; where there is none they would hide the legend. */
  const tools = () => (matchMedia("(hover: hover)").matches ? "hover" : false);
  const PAPER = 680; // pixels across a page of A4 or letter: charts keep their size where it changes
  const printing = () => document.documentElement.classList.contains("print");
  const narrow = (id) => !printing() && at(id).clientWidth < 600;
  function theme() {
    return {
      ...(printing() ? { autosize: false, width: PAPER } : { autosize: true }),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), family: "system-ui, sans-serif", size: 13 },
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--line"), font: { color: color("--ink") }, align: "left" },
    };
  }
  /* Ticks of a logarithmic axis that are numbers in full: five of every power of ten. */
  function ticks(values) {
    const found = [], least = Math.max(Math.min(...values), 1e-6), most = Math.max(...values);
    for (let power = 10 ** Math.floor(Math.log10(least)); power <= most * 2; power *= 10)
      found.push(...[1, 2, 3, 5, 7].map((digit) => digit * power).filter((tick) => tick > least / 2 && tick < most * 2));
    return { tickvals: found, ticktext: found.map((tick) => String(Number(tick.toPrecision(1)))) };
  }
  /* Plans over the limit, or far slower than the fastest of as many devices that fits, squeeze the others into a corner. */
  const SLOW = 3;
  let everything = false; // outliers are drawn, too
  const within = (bytes) => !data.memory_limit || bytes <= data.memory_limit;
  const costs = [...data.plans.map((p) => [p.devices, p.seconds, p.bytes]), ...data.rivals.map((r) => r.slice(1, 4))];
  const fastest = new Map(deviceCounts.map((devices) => [devices,
    Math.min(...costs.filter(([count, , bytes]) => count === devices && within(bytes)).map(([, seconds]) => seconds))]));
  const someFit = [...fastest.values()].some(Number.isFinite);
  const isOutlier = (devices, seconds, bytes) => someFit && (!within(bytes) || seconds > SLOW * fastest.get(devices));
  const isDrawn = (devices, seconds, bytes, index) => everything || index === chosen || !isOutlier(devices, seconds, bytes);
  const legendOnly = (name, marks) => ({ name, type: "scatter", x: [null], y: [null], hoverinfo: "skip", ...marks });
  /* Points with a gap between neighbours of other parallelism, so that a line joins only what is alike. */
  function withGaps(points) {
    return points.flatMap((p, i) => (i && p.plan.parallelism !== points[i - 1].plan.parallelism ? [null, p] : [p]));
  }
  function traces(power) {
    const found = [];
    for (const devices of deviceCounts.filter((count) => !hidden.has(count))) {
      const label = `${devices} device${devices > 1 ? "s" : ""}`, shade = seriesColor(devices);
      const own = data.plans.map((plan, index) => ({ plan, index }))
        .filter(({ plan: p, index }) => p.devices === devices && isDrawn(devices, p.seconds, p.bytes, index));
      for (const [name, searched, symbol] of [[label, true, "circle"], [`${label}, baselines`, false, "diamond"]]) {
        const points = own.filter((p) => (p.plan.name === "searched") === searched).sort((a, b) => a.plan.bytes - b.plan.bytes);
        if (!points.length) continue;
        const spaced = searched ? withGaps(points) : points;
        found.push({
          name, type: "scatter", mode: searched ? "lines+markers" : "markers", connectgaps: false,
          x: spaced.map((p) => p && p.plan.bytes / 2 ** power), y: spaced.map((p) => p && p.plan.seconds * 1e3),
          customdata: spaced.map((p) => (p ? p.index : -1)),
          text: spaced.map((p) => p && hover(searched ? p.plan.label : p.plan.name, p.plan.mesh, devices, p.plan.seconds, p.plan.bytes, p.plan.summary)),
          hovertemplate: "%{text}<extra></extra>",
          line: { color: shade, width: 1, dash: "dot" },
          marker: {
            symbol, color: shade, size: spaced.map((p) => (p && p.index === chosen ? 17 : 9)),
            line: { color: color("--ink"), width: spaced.map((p) => (p && p.index === chosen ? 2 : 0)) },
          },
        });
      }
      const others = data.rivals.filter(([, count, seconds, bytes]) => count === devices && isDrawn(count, seconds, bytes));
      const kinds = [["not saved", false, true], ["estimated", false, false], ["baselines, not saved", true, true], ["baselines, estimated", true, false]];
      for (const [kind, known, simulated] of kinds) {
        const points = others.filter((r) => Boolean(r[0]) === known && r[4] === simulated);
        const source = simulated ? "" : "<br>estimated by tables of costs, without what messages and operators wait for each other";
        if (points.length) found.push({
          name: `${label}, ${kind}`, type: "scatter", mode: "markers", opacity: simulated ? 1 : 0.45,
          x: points.map((r) => r[3] / 2 ** power), y: points.map((r) => r[2] * 1e3), customdata: points.map(() => -1),
          text: points.map((r) => hover(known ? r[0] : "on the frontier", "", r[1], r[2], r[3], known ? "a baseline" : `plan again with --memory-limit ${r[3]} to get it`) + source),
          hovertemplate: "%{text}<extra></extra>",
          marker: { symbol: known ? "diamond-open" : "circle-open", color: shade, size: 8 },
        });
      }
    }
    const ring = { color: "rgba(0,0,0,0)", size: 15, line: { color: color("--ink"), width: 2 } };
    found.push(legendOnly("the plan shown", { mode: "markers", marker: ring }));
    if (data.memory_limit) found.push(legendOnly("memory limit", { mode: "lines", line: { color: color("--limit"), dash: "dash", width: 2 } }));
    return found;
  }
  function drawFrontier() {
    const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line"), automargin: true };
    const [unit, power] = unitOf(costs.map(([, , bytes]) => bytes)), drawn = traces(power);
    const numbers = (name) => drawn.flatMap((trace) => trace[name]).filter((value) => value !== null);
    const times = numbers("y"), sizes = numbers("x");
    const wide = Math.max(...times) > SLOW * Math.min(...times); // else the slowest hide how the others differ
    const step = wide ? { type: "log", title: { text: "step time, ms (logarithmic)" }, ...ticks(times) } : { title: { text: "step time, ms" } };
    const layout = {
      ...theme(), margin: { t: 10, r: 10, b: 50, l: 60 }, hovermode: "closest",
      xaxis: { ...axis, title: { text: `memory per rank, ${unit}` } }, yaxis: { ...axis, ...step },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, showlegend: true, shapes: [], annotations: [],
    };
    if (data.memory_limit && sizes.length) {
      const x = data.memory_limit / 2 ** power, most = Math.max(...sizes), least = Math.min(...sizes);
      const pad = Math.max(most - least, 0.1 * most) * 0.06;
      if (x > 2 * most) layout.xaxis.range = [least - pad, most + pad]; // the line is far off
      layout.shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: color("--limit"), dash: "dash", width: 2 } });
      const far = Boolean(layout.xaxis.range), place = far ? { x: 1, xref: "paper" } : { x };
      layout.annotations.push({ ...place, yref: "paper", y: 1, xanchor: "right", xshift: far ? 0 : -4, text: `limit ${size(data.memory_limit)}${far ? " →" : ""}`, showarrow: false, font: { color: color("--limit") } });
    }
    Plotly.react("frontier", drawn, layout, { responsive: true, displaylogo: false, displayModeBar: tools() });
  }
  function drawOutliers() {
    const count = costs.filter((cost) => isOutlier(...cost)).length, box = at("outliers").querySelector("input");
    at("outliers").hidden = !count;
    at("outliers").querySelector("span").textContent =
      `also ${count} plan${count > 1 ? "s" : ""} that ${count > 1 ? "do" : "does"} not fit, or ${count > 1 ? "take" : "takes"} more than ${SLOW} times as long as the fastest that fits`;
    box.addEventListener("change", () => { everything = box.checked; drawCharts(); });
  }
  function drawDevices() {
    for (const count of deviceCounts) {
      const label = element("label"), box = element("input", "", { type: "checkbox", value: count });
      box.checked = true;
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(count); else hidden.add(count);
        drawCharts();
        for (const row of at("plans").tBodies[0].rows) row.hidden = hidden.has(Number(row.dataset.devices));
      });
      label.append(box, ` ${count}`);
      at("devices").append(label);
    }
    at("devices").hidden = deviceCounts.length < 2;
  }
  function called(plan) { // a searched plan by its file, a well-known one by its name too
    if (plan.name === "searched" || plan.name === plan.label) return plan.label;
    return `${plan.name} (${plan.label})`;
  }
  function drawPlans() {
    data.plans.forEach((plan, index) => {
      const row = element("tr", "", { "data-index": index, "data-devices": plan.devices });
      const radio = element("input", "", { type: "radio", name: "plan", value: index, "aria-label": plan.label });
      radio.addEventListener("change", () => choose(index));
      row.addEventListener("click", () => choose(index));
      const first = element("td");
      first.append(radio);
      row.append(first, element("td", called(plan)),
        element("td", plan.devices), element("td", plan.mesh),
        element("td", ms(plan.seconds), { class: "number" }), element("td", size(plan.bytes), { class: "number bytes" }),
        element("td", plan.summary, { class: "words" }));
      if (data.memory_limit && plan.bytes > data.memory_limit) row.classList.add("over");
      at("plans").tBodies[0].append(row);
    });
  }

  /* ---- the chosen plan ---- */
  function figures(id, rows) {
    at(id).tBodies[0].replaceChildren(...rows.map(([name, value]) => {
      const row = element("tr");
      row.append(element("th", name, { scope: "row" }), element("td", value, { class: "number" }));
      return row;
    }));
  }
  function drawPlan() {
    const plan = data.plans[chosen], parts = plan.parts, rest = plan.seconds - parts.compute - parts.communication - parts.update;
    const name = ["searched", plan.label].includes(plan.name) ? plan.label : `${plan.label}: ${plan.name}`;
    at("verdict-title").textContent = name;
    at("verdict").classList.toggle("doubt", plan.may_fit);
    at("verdict").classList.toggle("over", !plan.may_fit && !within(plan.bytes));
    at("fit").textContent = plan.verdict;
    at("strategy").textContent = plan.headline;
    at("answer").replaceChildren(...plan.answer.flatMap(([label, text]) => [element("dt", label), element("dd", text)]));
    at("plan-title").textContent = `${name}, ${plan.mesh} on ${plan.machine}`;
    at("plan-summary").textContent = plan.summary;
    const rows = [["step", ms(plan.seconds)], ["compute", ms(parts.compute)], ["communication", ms(parts.communication)], ["update", ms(parts.update)]];
    if (Math.abs(rest) > 0.01 * plan.seconds) rows.push([rest > 0 ? "waiting" : "overlapped", ms(Math.abs(rest))]);
    if (plan.bound > 0) rows.push(["lower bound of all plans", ms(plan.bound)]);
    figures("parts", rows);
    figures("held", [["peak", size(plan.bytes)], ["state", size(plan.held.state)],
      ["saved for backward", size(plan.held.saved_for_backward)], ["other", size(plan.held.other)]]);
    at("head").textContent = plan.head.join("\n");
    at("axes").replaceChildren("Mesh axes: ", ...plan.axes.flatMap((axis, i) => [element("span", axis, { class: `axis axis-${i % 5}` }), " "]));
    for (const row of at("plans").tBodies[0].rows) {
      const own = Number(row.dataset.index) === chosen;
      row.classList.toggle("chosen", own);
      row.querySelector("input").checked = own;
      if (own) at("plans-scroll").scrollTop = row.offsetTop - at("plans-scroll").clientHeight / 2;
    }
  }

  /* ---- the tree ---- */
  let rows = []; // of the tree, in order: {node, depth, parent, row, open}
  function plant(plan) {
    rows = [];
    const body = at("tree").tBodies[0];
    body.replaceChildren();
    (function grow(node, depth, parent, prefix) {
      const full = prefix ? `${prefix}.${node.name}` : node.name;
      const entry = { node, depth, parent, open: depth < 2, leaf: !node.children.length, row: element("tr", "", { role: "row", "aria-level": depth + 1, tabindex: -1 }) };
      entry.fill = () => fill(entry, plan.axes);
      entry.text = [full, node.path, node.text, ...node.moves.map((m) => `${m[0]} ${m[1]}`)].join(" ").toLowerCase();
      rows.push(entry);
      body.append(entry.row);
      node.children.forEach((child) => grow(child, depth + 1, entry, depth ? full : ""));
    })(plan.tree, 0, null, "");
    rows[0].row.tabIndex = 0;
    const many = rows.filter((entry) => entry.depth <= 2).length > 60;
    for (const entry of rows) entry.open = entry.depth < (many ? 1 : 2);
    show();
  }
  /* Cells are made when a row is first seen: deep models have thousands. */
  function fill(entry, axes) {
    const { node, depth, row } = entry;
    const cells = node.costs.map((cost, i) => element("td", cost ? (i < KEYS.compute ? size(cost) : ms(cost)) : "–", { class: "number", role: "gridcell" }));
    const name = element("td", "", { role: "gridcell" }), twig = element("span", "", { class: "twig", "aria-hidden": "true" });
    name.style.paddingLeft = `${0.6 + 1.1 * depth}em`;
    twig.addEventListener("click", () => { entry.open = !entry.open; show(); });
    name.append(twig, node.name);
    if (node.count > 1) name.append(element("span", ` × ${node.count}`, { class: "count" }));
    const words = layouts(element("td", "", { role: "gridcell", class: "words" }), node.text, axes);
    if (node.moves.length) {
      const list = element("ul", "", { class: "moves" });
      for (const [kind, where] of node.moves) list.append(layouts(element("li"), `${kind}, ${where}`, axes));
      words.append(list);
    }
    row.append(name, ...cells, words);
    entry.fill = null;
  }
  function show() {
    const wanted = at("filter").value.trim().toLowerCase();
    const kept = new Set();
    if (wanted) for (const entry of rows) if (entry.text.includes(wanted)) for (let e = entry; e; e = e.parent) kept.add(e);
    for (const entry of rows) {
      let visible = true;
      for (let e = entry.parent; e && visible && !wanted; e = e.parent) visible = e.open;
      entry.row.hidden = wanted ? !kept.has(entry) : !visible;
      if (entry.row.hidden) continue;
      if (entry.fill) entry.fill();
      entry.row.querySelector(".twig").textContent = entry.leaf ? "" : entry.open || wanted ? "▾" : "▸";
      if (!entry.leaf) entry.row.setAttribute("aria-expanded", String(Boolean(entry.open || wanted)));
    }
    const seen = rows.filter((entry) => !entry.row.hidden), matching = rows.filter((entry) => wanted && entry.text.includes(wanted)).length;
    at("found").textContent = !wanted ? "" : matching ? `${matching} of ${rows.length} modules` : `no module has ${wanted} in its name, layouts or collectives`;
    if (seen.length && !seen.some((entry) => entry.row.tabIndex === 0)) reach(seen[0]); // else Tab passes the tree by
  }
  function reach(entry) {
    for (const other of rows) other.row.tabIndex = -1;
    entry.row.tabIndex = 0;
  }
  at("tree").addEventListener("keydown", (event) => {
    const seen = rows.filter((entry) => !entry.row.hidden), place = seen.findIndex((entry) => entry.row === document.activeElement);
    if (place < 0) return;
    const here = seen[place];
    let next = null;
    if (event.key === "ArrowDown") next = seen[place + 1];
    else if (event.key === "ArrowUp") next = seen[place - 1];
    else if (event.key === "Home") next = seen[0];
    else if (event.key === "End") next = seen[seen.length - 1];
    else if (event.key === "ArrowRight") { if (here.open) next = seen[place + 1]; else here.open = true; }
    else if (event.key === "ArrowLeft") { if (here.open && !here.leaf) here.open = false; else next = here.parent; }
    else if (event.key === "Enter" || event.key === " ") here.open = !here.open;
    else return;
    event.preventDefault();
    show();
    if (next) next.row.focus();
  });
  at("tree").addEventListener("focusin", (event) => {
    const entry = rows.find((other) => other.row === event.target);
    if (entry) reach(entry);
  });
  at("filter").addEventListener("input", show);
  at("open-all").addEventListener("click", () => { rows.forEach((entry) => { entry.open = true; }); show(); });
  at("close-all").addEventListener("click", () => { rows.forEach((entry) => { entry.open = entry.depth < 1; }); show(); });

  /* ---- treemap and collectives ---- */
  function drawMap() {
    const plan = data.plans[chosen], measure = at("measure").value, seconds = measure === "compute" || measure === "comm";
    const value = (costs) => (measure === "memory" ? costs[0] + costs[1] + costs[2] : costs[KEYS[measure]]);
    const ids = [], labels = [], parents = [], values = [], text = [];
    (function add(node, parent, times) {
      const all = times * node.count, total = value(node.costs) * all;
      if (total <= 0) return;
      const id = `${ids.length}`;
      ids.push(id); parents.push(parent); values.push(total);
      labels.push(escaped(node.name) + (node.count > 1 ? ` × ${node.count}` : ""));
      text.push(seconds ? ms(total) : size(total));
      node.children.forEach((child) => add(child, id, all));
      const own = total - node.children.reduce((sum, child) => sum + value(child.costs) * child.count, 0) * all;
      if (node.children.length && own > 0.002 * total) { // what belongs to the module itself
        ids.push(`${ids.length}`); parents.push(id); values.push(own); labels.push("itself"); text.push(seconds ? ms(own) : size(own));
      }
    })(plan.tree, "", 1);
    const trace = { type: "treemap", ids, labels, parents, values, text, branchvalues: "total", maxdepth: 4, hovertemplate: "%{label}<br>%{text}<extra></extra>", texttemplate: "%{label}<br>%{text}", tiling: { pad: 1 } };
    Plotly.react("map", [trace], { ...theme(), margin: { t: 10, r: 5, b: 5, l: 5 } }, { responsive: true, displayModeBar: false });
  }
  function drawMoves() {
    const plan = data.plans[chosen], found = [];
    (function add(node, times) {
      const all = times * node.count;
      for (const [kind, where, source, bytes, seconds, often] of node.moves) found.push({ path: node.path + (all > 1 ? ` and ${all - 1} like it` : ""), kind, where, source, bytes, seconds: seconds * all, times: often * all });
      node.children.forEach((child) => add(child, all));
    })(plan.tree, 1);
    found.sort((a, b) => b.seconds - a.seconds);
    at("moves").tBodies[0].replaceChildren(...found.map((move) => {
      const row = element("tr");
      row.append(element("td", move.path || "(model)"), layouts(element("td"), move.kind, plan.axes), element("td", move.times, { class: "number" }),
        element("td", size(move.bytes), { class: "number" }), element("td", ms(move.seconds), { class: "number" }), element("td", move.where, { title: move.source }));
      return row;
    }));
  }
  function drawMeasured() {
    const table = at("measured");
    if (!table) return;
    for (const [label, ...run] of data.measured) {
      for (const [what, write, predicted, measured] of [["step", ms, run[0], run[1]], ["peak memory of tensors", size, run[2], run[3]]]) {
        if (!predicted || !measured) continue; // nobody counted memory
        const row = element("tr"), number = { class: "number" };
        row.append(element("td", label), element("td", what), element("td", write(predicted), number), element("td", write(measured), number), element("td", (predicted / measured).toFixed(2), number));
        table.tBodies[0].append(row);
      }
    }
  }

  /* ---- the timeline: one row per stream, as in Perfetto ---- */
  function drawTimeline() {
    if (!at("timeline")) return;
    const parts = [data.plans[chosen].step, data.timeline].filter(Boolean), rows = [], events = [];
    for (const part of parts) {
      events.push(...part.events.map(([row, ...rest]) => [row + rows.length, ...rest]));
      rows.push(...part.rows.map((row) => (parts.length > 1 ? `${part.label}: ${row}` : row)));
    }
    at("timeline-label").textContent = parts.map((part) => part.label).join("; ");
    const kinds = [...new Set(events.map((e) => e[2]))];
    const traces = kinds.map((kind, i) => {
      const own = events.filter((e) => e[2] === kind);
      return {
        name: kind || "other", type: "bar", orientation: "h", base: own.map((e) => e[3] / 1e3), x: own.map((e) => e[4] / 1e3), y: own.map((e) => e[0]),
        text: own.map((e) => `<b>${escaped(e[1])}</b><br>${escaped(e[5])}<br>${ms(e[4] / 1e6)} from ${ms(e[3] / 1e6)}`),
        textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: { color: color(`--axis-${i % 5}`), line: { width: 0 } }, width: 0.8,
      };
    });
    const axis = { gridcolor: color("--line"), zeroline: false, automargin: true };
    const label = (row) => (narrow("timeline") ? escaped(row).replace(/([:,]) /g, "$1<br>") : escaped(row));
    at("timeline").style.height = `${9 + (narrow("timeline") ? 4 : 2.5) * rows.length}rem`;
    Plotly.react("timeline", traces, {
      ...theme(), barmode: "overlay", margin: { t: 30, r: 10, b: 45, l: 60 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, showlegend: true,
      xaxis: { ...axis, title: { text: "ms" } }, yaxis: { ...axis, tickvals: rows.map((_, i) => i), ticktext: rows.map(label), autorange: "reversed", fixedrange: true },
    }, { responsive: true, displaylogo: false, displayModeBar: tools() });
  }

  /* ---- memory over the step: causes stacked on each other ---- */
  function drawCurve() {
    if (!at("over")) return;
    const { curve } = data.plans[chosen];
    at("over").hidden = !curve;
    if (!curve) return;
    const levels = curve.causes.map(([, sizes]) => (Array.isArray(sizes) ? sizes : curve.what.map(() => sizes)));
    const totals = curve.what.map((_, i) => levels.reduce((sum, sizes) => sum + sizes[i], 0)), most = Math.max(...totals);
    const [unit, power] = unitOf(totals), place = totals.indexOf(most);
    at("over-peak").textContent = `${size(most)}, in ${curve.at || curve.what[place]}`;
    const found = curve.causes.map(([name], i) => ({
      name, type: "scatter", mode: "lines", stackgroup: "causes", line: { width: 0.5, shape: "hv", color: color(`--cause-${i}`) }, fillcolor: color(`--cause-${i}`),
      x: curve.what.map((_, step) => step), y: levels[i].map((bytes) => bytes / 2 ** power),
      text: levels[i].map((bytes) => size(bytes)), hovertemplate: "%{text}",
    })).filter((_, i) => Math.max(...levels[i]) > 0.002 * most);
    found.push({
      name: "in all", type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, x: found[0].x, y: totals.map((bytes) => bytes / 2 ** power),
      text: totals.map((bytes, i) => `${size(bytes)} in all: ${escaped(curve.what[i])}`), hovertemplate: "%{text}<extra></extra>",
    });
    const axis = { gridcolor: color("--line"), zeroline: false, automargin: true }, shapes = [];
    if (data.memory_limit && data.memory_limit < 1.5 * most) {
      const y = data.memory_limit / 2 ** power;
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: color("--limit"), dash: "dash", width: 2 } });
    }
    const top = Math.max(most, shapes.length ? data.memory_limit : 0) / 2 ** power;
    Plotly.react("curve", found, {
      ...theme(), margin: { t: 30, r: 10, b: 45, l: 60 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "x unified", shapes,
      xaxis: { ...axis, title: { text: "instructions of the step" }, showticklabels: false }, yaxis: { ...axis, title: { text: unit }, range: [0, 1.05 * top] },
    }, { responsive: true, displaylogo: false, displayModeBar: tools() });
  }

  /* ---- another plan beside it ---- */
  function drawCompared() {
    const texts = data.differences[chosen];
    at("compare").hidden = !texts;
    if (!texts) return;
    const others = data.plans.map((_, i) => i).filter((i) => i !== chosen);
    const kept = Number(at("other").value);
    at("other").replaceChildren(...others.map((i) => element("option", data.plans[i].label, { value: i })));
    at("other").value = others.includes(kept) && at("other").dataset.set ? kept : others[0];
    drawDifference();
  }
  function drawDifference() {
    at("difference").replaceChildren();
    layouts(at("difference"), data.differences[chosen][Number(at("other").value)], data.plans[chosen].axes);
  }

  /* ---- one layer: tensors as rectangles ---- */
  const MOST = 16; // parts of a rectangle that are drawn, each way
  function position(rank, axes) { // of a rank along each axis, the last one innermost
    const found = [];
    for (const [, size] of [...axes].reverse()) { found.unshift(rank % size); rank = Math.floor(rank / size); }
    return found;
  }
  function tensor({ name, placements }, axes, place) {
    const cuts = { rows: { count: 1, at: 0 }, columns: { count: 1, at: 0 } };
    const words = [];
    let copies = 1, partial = false;
    placements.forEach((placement, axis) => {
      const [label, size] = axes[axis];
      if (size === 1) return;
      if (placement === "R") { copies *= size; return; }
      words.push(`${label}:${placement}`);
      if (placement === "P") { partial = true; return; }
      const way = cuts[placement.startsWith("S(0") ? "rows" : "columns"];
      way.count *= size;
      way.at = way.at * size + place[axis];
    });
    const parts = cuts.rows.count * cuts.columns.count;
    const held = `device holds 1 of ${parts} part${parts > 1 ? "s" : ""}`.replace("1 of 1 part", "all of it");
    const also = `${copies > 1 ? `, as ${copies - 1} other${copies > 2 ? "s" : ""} do${copies > 2 ? "" : "es"}` : ""}${partial ? "; to be summed" : ""}`;
    const figure = element("figure", "", { class: "tensor", title: `${name}: ${held}${also}` });
    const box = element("div", "", { class: "tiles", role: "img", "aria-label": `${name}: ${held}${also}` });
    const [rows, columns] = [cuts.rows, cuts.columns].map(({ count, at: mine }) => (count > MOST ? { count: MOST, at: Math.floor(mine * MOST / count) } : { count, at: mine }));
    box.style.gridTemplateColumns = `repeat(${columns.count}, 1fr)`;
    for (let row = 0; row < rows.count; row++) for (let column = 0; column < columns.count; column++) {
      const mine = row === rows.at && column === columns.at;
      box.append(element("span", "", mine ? { class: partial ? "mine partial" : "mine" } : {}));
    }
    const caption = element("figcaption", `${name} `);
    layouts(caption, words.join(" ") || (copies > 1 ? "a copy each" : ""), axes.map(([axis]) => axis));
    figure.append(box, caption);
    return figure;
  }
  function drawLayer() {
    const { layer, axes: names } = data.plans[chosen];
    at("layer").hidden = !layer;
    if (!layer) return;
    const devices = layer.axes.reduce((product, [, size]) => product * size, 1);
    const slider = at("rank");
    slider.max = devices - 1;
    if (Number(slider.value) >= devices || !slider.dataset.moved) slider.value = 0;
    const rank = Number(slider.value), place = position(rank, layer.axes);
    at("rank-text").textContent = `${rank} of ${devices}: ${layer.axes.map(([name], i) => `${name} ${place[i]}`).join(", ")}`;
    at("layer-title").textContent = layer.count > 1 ? `One layer: ${layer.name}, ${layer.count} equal ones` : `One layer: ${layer.name}`;
    const cell = (parts) => { const made = element("td"); made.append(...parts); return made; };
    const lines = (texts) => cell(texts.map((text) => layouts(element("div"), text, names)));
    at("steps").tBodies[0].replaceChildren(...layer.steps.map((step) => {
      const row = element("tr");
      const title = element("th", step.module ? `${step.module}: ${step.kind}` : step.kind, { scope: "row" });
      const drawn = (tensors) => cell(tensors.map((one) => tensor(one, layer.axes, place)));
      row.append(title, layouts(element("td"), step.splits, names), drawn(step.parameters), drawn([step.result]), lines(step.before), lines(step.backward));
      return row;
    }));
  }

  function drawCharts() {
    if (!window.Plotly) return; // tables come first, the library after them
    drawFrontier();
    for (const [id, draw] of later) if (seen.has(id)) draw();
  }
  /* Charts further down are drawn when they come into view: the page opens sooner. */
  const seen = new Set(), later = [["map", drawMap], ["timeline", drawTimeline], ["curve", drawCurve]];
  function drawOnSight() {
    const watch = new IntersectionObserver((found) => {
      for (const { target } of found.filter((entry) => entry.isIntersecting && !seen.has(entry.target.id))) {
        seen.add(target.id);
        later.find(([id]) => id === target.id)[1]();
      }
    }, { rootMargin: "200px" });
    for (const [id] of later) if (at(id)) watch.observe(at(id));
  }
  function choose(index) {
    chosen = index;
    drawPlan(); plant(data.plans[chosen]); drawCompared(); drawLayer(); drawMoves(); drawCharts();
  }
  const machines = [...new Set(data.plans.map((p) => p.machine))];
  at("subtitle").textContent = data.plans.length > 1 ? `${data.plans.length} plans for ${machines.join(", ")}` : `a step on ${data.plans[0].inputs}`;
  drawDevices(); drawOutliers(); drawPlans(); drawMeasured(); choose(chosen);
  at("measure").addEventListener("change", drawMap);
  at("other").addEventListener("change", () => { at("other").dataset.set = "true"; drawDifference(); });
  at("rank").addEventListener("input", () => { at("rank").dataset.moved = "true"; drawLayer(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) addEventListener(event, () => {
    document.documentElement.classList.toggle("print", on);
    if (on) later.forEach(([id]) => seen.add(id));
    drawCharts();
  });
  window.drawReport = () => {
    drawCharts(); drawOnSight();
    at("frontier").on("plotly_click", (event) => { const index = event.points[0].customdata; if (index >= 0) choose(index); });
    document.documentElement.dataset.ready = "true";
  };
  document.documentElement.dataset.tables = performance.now();
})();
drawn.catch(() => {}); // the page says it once the library is there, too
