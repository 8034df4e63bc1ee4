"use strict";
/* The page of `shardwright explore`: sliders, the plan for their values, and the settings tried before. */
(() => {
  const { sliders } = JSON.parse(document.getElementById("data").textContent);
  const token = new URLSearchParams(location.search).get("token");
  const PAUSE = 250; // milliseconds without a move before a plan is asked for
  const LABELS = { devices: "Devices", memory: "Memory per device", batch: "Batch", seq: "Tokens per sequence" };
  const places = sliders.map((slider) => slider.start);
  const tried = []; // { places, plan }, the latest last
  let asked = 0; // counts the settings; answers to older ones are dropped

  const rate = (plan) => `${Math.round(plan.rate).toLocaleString("en")} ${plan.unit}`;
  const percent = (now, before) => `${now >= before ? "+" : "−"}${Math.abs((now / before - 1) * 100).toFixed(1)} %`;

  const query = (these) => new URLSearchParams(
    [...sliders.map((slider, i) => [slider.name, slider.values[these[i]]]), ["token", token]]).toString();

  /* ---- the sliders ---- */
  function show(i) {
    const text = sliders[i].texts[places[i]];
    at(`value-${i}`).textContent = text;
    at(`slider-${i}`).value = places[i];
    at(`slider-${i}`).setAttribute("aria-valuetext", text);
  }
  sliders.forEach((slider, i) => {
    const label = element("label", LABELS[slider.name], { for: `slider-${i}` });
    const input = element("input", "", { id: `slider-${i}`, type: "range", min: 0, max: slider.values.length - 1, step: 1 });
    if (slider.values.length === 1) input.disabled = true;
    input.addEventListener("input", () => { places[i] = Number(input.value); show(i); ask(PAUSE); });
    const output = element("output", "", { id: `value-${i}`, for: `slider-${i}` });
    const group = element("div", "", { class: "slider" });
    group.append(label, input, output);
    at("sliders").append(group);
    show(i);
  });
  at("sliders").addEventListener("submit", (event) => event.preventDefault());

  /* ---- the plan ---- */
  function draw(plan, before, these) {
    at("verdict").hidden = false;
    at("verdict").classList.toggle("over", plan.state === "failed");
    at("verdict").classList.toggle("doubt", Boolean(plan.may_fit));
    at("fit").textContent = plan.state === "failed" ? plan.error : plan.verdict;
    at("strategy").textContent = plan.state === "failed" ? "" : plan.strategy;
    at("change").textContent = change(plan, before);
    const lines = plan.state === "failed" ? [] : [...plan.answer, ...plan.notes.map((note) => ["note", note])];
    at("answer").replaceChildren(...lines.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
    at("report").hidden = plan.state === "failed";
    at("report").href = `/report?${query(these)}`;
  }
  function change(plan, before) {
    if (!before || before.state === "failed" || plan.state === "failed") return "";
    const parts = [
      `${rate(before)} → ${rate(plan)} (${percent(plan.rate, before.rate)})`,
      `step ${ms(before.seconds)} → ${ms(plan.seconds)}`,
      `memory ${size(before.bytes)} → ${size(plan.bytes)} (${percent(plan.bytes, before.bytes)})`,
    ];
    if (plan.strategy !== before.strategy) parts.push(`strategy was ${before.strategy}`);
    return `Change: ${parts.join("; ")}`;
  }

  /* ---- what was tried ---- */
  function list() {
    const columns = ["", ...sliders.map((slider) => LABELS[slider.name]), "speed", "step", "memory", "strategy"];
    at("history").hidden = tried.length === 0;
    at("tried").tHead.rows[0].replaceChildren(...columns.map((name) => element("th", name, { scope: "col" })));
    at("tried").tBodies[0].replaceChildren(...tried.toReversed().map(({ places: these, plan }) => {
      const row = element("tr"), button = element("button", "set", { type: "button" });
      button.addEventListener("click", () => { these.forEach((place, i) => { places[i] = place; show(i); }); ask(0); });
      const cell = element("td");
      cell.append(button);
      const figures = plan.state === "failed" ? ["", "", "", plan.error] : [rate(plan), ms(plan.seconds), size(plan.bytes), plan.strategy];
      row.append(cell, ...sliders.map((slider, i) => element("td", slider.texts[these[i]])), ...figures.map((text) => element("td", text)));
      return row;
    }));
  }

  /* ---- asking for plans ---- */
  async function ask(pause) {
    const mine = ++asked, these = [...places];
    const newest = () => mine === asked;
    await new Promise((done) => setTimeout(done, pause));
    const start = performance.now();
    let plan = { state: "planning" };
    while (newest() && plan.state === "planning") {
      at("state").textContent = `planning, ${((performance.now() - start) / 1e3).toFixed(0)} s`;
      document.body.classList.add("waiting");
      try {
        plan = await (await fetch(`/plan?${query(these)}`)).json();
      } catch {
        plan = { state: "failed", error: "the command has ended; start it again", ended: true };
      }
    }
    if (!newest()) return;
    document.body.classList.remove("waiting");
    at("state").textContent = "";
    const before = tried.at(-1)?.plan;
    draw(plan, before, these);
    if (plan.ended) return;
    const same = tried.findIndex((one) => String(one.places) === String(these));
    if (same >= 0) tried.splice(same, 1);
    tried.push({ places: these, plan });
    list();
  }
  ask(0);
})();
