"use strict";
// The charts, drawn from the JSON of the API. Colours are those of the tables' swatches, so that both have one legend.
window.cukiln = (() => {
  const STAGES = ["lower", "codegen", "compile", "verify", "measure"];
  const KINDS = ["plan", "compile", "verify", "measure", "compare", "finish"];
  const LANE_PIXELS = 24;

  /** The colour that the style sheet gives a class; a custom property would come unresolved, with its light-dark(). */
  function colourOf(name, property = "backgroundColor") {
    const probe = document.createElement("i");
    probe.className = name;
    document.body.append(probe);
    const colour = getComputedStyle(probe)[property];
    probe.remove();
    return colour;
  }

  const swatch = (name) => colourOf(`swatch ${name}`);

  function options(unit, { stacked = true, horizontal = false } = {}) {
    const muted = colourOf("muted", "color");
    const grid = colourOf("swatch wait");
    const value = { stacked, beginAtZero: true, grid: { color: grid }, ticks: { color: muted }, title: { display: true, text: unit, color: muted } };
    const label = { stacked, grid: { display: false }, ticks: { color: muted, autoSkip: !horizontal } };
    return {
      indexAxis: horizontal ? "y" : "x",
      animation: false,
      responsive: true,
      maintainAspectRatio: false,
      scales: horizontal ? { x: value, y: label } : { x: label, y: value },
      plugins: { legend: { position: "bottom", labels: { color: muted, boxWidth: 12, boxHeight: 12 } } },
    };
  }

  /** Draws on the canvas, or redraws what is there. */
  function draw(id, data, settings) {
    const canvas = document.getElementById(id);
    if (!canvas) return;
    for (let part = canvas; part && part.id !== "main"; part = part.parentElement) {
      if (part.hasAttribute("data-script")) part.hidden = false;
    }
    const chart = Chart.getChart(canvas);
    if (chart) {
      chart.data = data;
      chart.options = settings;
      chart.update("none");
    } else {
      new Chart(canvas, { type: "bar", data, options: settings });
    }
  }

  const bars = (label, name, data) => ({ label, data, backgroundColor: swatch(name), maxBarThickness: 48 });

  const stageBars = (rows, part) =>
    STAGES.map((stage) => bars(stage, stage, rows.map((row) => row.reduce((sum, one) => sum + one.seconds[stage][part], 0))));

  function operators(timings, part) {
    const labels = timings.map((row) => row.operator);
    const data = { labels, datasets: stageBars(timings.map((row) => [row]), part) };
    draw("chart-operators", data, options(part === "cpu" ? "CPU seconds" : "seconds", { horizontal: true }));
  }

  /** Every day from the first to the last, those without work too; of a long history the last 92. */
  function daysOf(timings) {
    const known = timings.map((row) => row.day).sort();
    const days = [];
    if (!known.length) return days;
    for (let at = Date.parse(known[0]); at <= Date.parse(known.at(-1)); at += 86400e3) {
      days.push(new Date(at).toISOString().slice(0, 10));
    }
    return days.slice(-92);
  }

  function days(timings, part) {
    const labels = daysOf(timings);
    const rows = labels.map((day) => timings.filter((row) => row.day === day));
    draw("chart-days", { labels, datasets: stageBars(rows, part) }, options(part === "cpu" ? "CPU seconds" : "seconds"));
    const total = (count) => rows.map((row) => row.reduce((sum, one) => sum + count(one), 0));
    const datasets = [
      bars("computed", "compile", total((one) => one.problems - one.cached)),
      bars("from the cache", "codegen", total((one) => one.cached)),
    ];
    const settings = options("problems");
    settings.scales.y.ticks.precision = 0;
    draw("chart-cache", { labels, datasets }, settings);
  }

  /** Those of compiling, the longest first; the wait for a worker overlaps other work and has no bar. */
  function phases(timings) {
    const sums = {};
    for (const row of timings) {
      for (const [name, seconds] of Object.entries(row.phases)) sums[name] = (sums[name] ?? 0) + seconds;
    }
    const found = Object.entries(sums).filter(([name, seconds]) => name !== "queue" && seconds > 0);
    found.sort(([one, first], [other, second]) => second - first || (one < other ? -1 : 1));
    const labels = found.map(([name]) => name);
    const settings = options("seconds", { stacked: false, horizontal: true });
    settings.plugins.legend.display = false;
    draw("chart-phases", { labels, datasets: [bars("seconds", "compile", found.map(([, seconds]) => seconds))] }, settings);
  }

  function stages(job) {
    const parts = ["wall", "cpu"];
    const datasets = STAGES.map((stage) => bars(stage, stage, parts.map((part) => job.seconds[stage][part])));
    if (!datasets.some(({ data }) => data.some((seconds) => seconds > 0))) return; // all of it was known before
    const settings = options("seconds", { horizontal: true });
    draw("chart-stages", { labels: ["wall", "CPU"], datasets }, settings);
  }

  /** Floating bars: [from, to] in seconds since the job came, on the lane of what was worked on. */
  function timeline(found) {
    const since = (at) => at - found.created_at;
    const pieces = Object.fromEntries(["wait", ...KINDS].map((kind) => [kind, []]));
    for (const lane of found.lanes) {
      for (const step of lane.steps) {
        const end = step.finished_at ?? found.at;
        pieces.wait.push({ y: lane.name, x: [since(step.queued_at), since(step.started_at ?? end)] });
        if (step.started_at !== null) pieces[step.kind].push({ y: lane.name, x: [since(step.started_at), since(end)] });
      }
    }
    const labels = found.lanes.map((lane) => lane.name);
    const datasets = Object.entries(pieces)
      .filter(([, data]) => data.length)
      .map(([kind, data]) => ({ ...bars(kind, kind, data), grouped: false, minBarLength: 2, barPercentage: 0.9, categoryPercentage: 0.9 }));
    const canvas = document.getElementById("chart-timeline");
    if (!canvas || !labels.length) return;
    canvas.parentElement.style.height = `${labels.length * LANE_PIXELS + 90}px`;
    const settings = options("seconds since the job was sent", { stacked: false, horizontal: true });
    settings.plugins.tooltip = {
      callbacks: { label: ({ dataset, raw }) => `${dataset.label}: ${raw.x[0].toFixed(2)} to ${raw.x[1].toFixed(2)} s` },
    };
    draw("chart-timeline", { labels, datasets }, settings);
  }

  return { operators, days, phases, stages, timeline };
})();
