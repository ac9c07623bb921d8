// Draws the charts of the page with BokehJS, from the JSON in #drawing. All text of the run stays text.
(() => {
  "use strict";
  // Okabe and Ito's colours, which colour-blind people can tell apart; each series has a dash of its own as well.
  const THEMES = {
    light: { series: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6100", "#56B4E9", "#000000"], text: "#57606a", grid: "#e3e7eb", mark: "#D55E00", epoch: "#8c959f" },
    dark: { series: ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#ffffff"], text: "#9aa4af", grid: "#2b323b", mark: "#E69F00", epoch: "#6e7781" },
  };
  const DASHES = ["solid", "6 3", "2 2", "10 3 2 3", "12 4", "4 4", "1 3"];
  const HEIGHT = 240;
  const PALETTE = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawing = JSON.parse(document.getElementById("drawing").textContent);
  let view = wholeView();
  let smoothing = 0.6; // as the slider in the page begins
  const drawn = new Map(); // by key: the Bokeh figure, its sources, and what it shows
  const hidden = new Set(); // "chart/series" that the reader switched off
  const logs = new Set();

  function theme() { return dark.matches ? THEMES.dark : THEMES.light; }
  function wholeView() { return { start: 0, end: Math.max(1, lastStep()) }; }

  function lastStep() {
    const ends = drawing.charts.flatMap((chart) => chart.series.map((one) => one.x.at(-1) ?? 0));
    return Math.max(1, ...ends, drawing.heat?.edges.at(-1) ?? 1);
  }

  // Debiased exponential smoothing, over the means of the buckets where the series was thinned out.
  function smoothed(series) {
    const [x, y] = series.meanX.length ? [series.meanX, series.meanY] : [series.x, series.y];
    let sum = 0, weight = 0;
    return { x, y: y.map((value) => {
      sum = sum * smoothing + value * (1 - smoothing);
      weight = weight * smoothing + (1 - smoothing);
      return sum / weight;
    }) };
  }

  function figureFor(key, options) {
    const colors = theme();
    const range = new Bokeh.Range1d({ start: view.start, end: view.end });
    const figure = Bokeh.Plotting.figure({
      height: HEIGHT, sizing_mode: "stretch_width", toolbar_location: null, tools: "", x_range: range,
      background_fill_color: null, border_fill_color: null, outline_line_color: null, min_border: 4, min_border_right: 12, ...options,
    });
    for (const axis of [figure.xaxis, figure.yaxis].flat()) {
      Object.assign(axis, { axis_line_color: colors.grid, major_tick_line_color: colors.grid, minor_tick_line_color: null, major_label_text_color: colors.text, major_label_text_font_size: "11px", axis_label_text_color: colors.text, axis_label_text_font_size: "11px", axis_label_text_font_style: "normal", axis_label_standoff: 1 });
    }
    figure.xaxis.axis_label = "step";
    wholeNumbers(figure.xaxis, figure.xgrid);
    for (const grid of [figure.xgrid, figure.ygrid].flat()) grid.grid_line_color = colors.grid;
    figure.xaxis.formatter = new Bokeh.BasicTickFormatter({ use_scientific: false });
    if (options.y_axis_type !== "log") figure.yaxis.formatter = new Bokeh.BasicTickFormatter({ power_limit_low: -4 });
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    figure.add_tools(zoom, new Bokeh.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } }));
    figure.toolbar.active_drag = zoom;
    for (const end of ["start", "end"]) range.properties[end].change.connect(() => follow(range));
    return figure;
  }

  function wholeNumbers(axis, grid) { axis.ticker = grid.ticker = new Bokeh.BasicTicker({ min_interval: 1 }); }

  // Lines that mark steps: the beginnings of epochs, and interruptions.
  function addMarks(figure) {
    const colors = theme();
    const epochs = drawing.epochs.map((one) => one.step);
    if (epochs.length) spans(figure, epochs, { line_color: colors.epoch, line_alpha: 0.8, line_dash: "2 4" });
    const ends = drawing.interruptions.map((one) => one.step);
    if (ends.length) spans(figure, ends, { line_color: colors.mark, line_width: 1.5, line_dash: "6 4" });
  }

  function spans(figure, steps, style) {
    const source = new Bokeh.ColumnDataSource({ data: { x: steps } });
    return figure.vspan({ field: "x" }, { source, ...style });
  }

  function addSeries(figure, chart, series, at) {
    const color = theme().series[series.color % 7], is_visible = !hidden.has(`${chart.key}/${at}`);
    const name = series.name, dash = DASHES[series.dash % 7];
    const raw = new Bokeh.ColumnDataSource({ data: { x: series.x, y: series.y } });
    const soft = new Bokeh.ColumnDataSource({ data: smoothed(series) });
    const style = { line_color: color, line_width: 1.5, line_dash: dash, visible: is_visible };
    const thin = series.isStep || series.isSparse || smoothing === 0 ? 1 : 0.3;
    const lines = [figure.line({ field: "x" }, { field: "y" }, { source: raw, name, ...style, line_alpha: thin })];
    if (series.isSparse) lines.push(figure.scatter({ field: "x" }, { field: "y" }, { source: raw, size: series.x.length > 12 ? 4 : 7, fill_color: color, line_color: null, visible: is_visible }));
    else if (!series.isStep) lines.push(figure.line({ field: "x" }, { field: "y" }, { source: soft, ...style, line_width: 2, visible: is_visible && smoothing > 0 }));
    const odd = series.odd.flat();
    if (odd.length) lines.push(spans(figure, odd, { line_color: theme().mark, line_width: 2, line_alpha: 0.6, visible: is_visible }));
    return { raw, soft, lines, series };
  }

  function drawChart(chart) {
    const element = document.querySelector(`[data-chart="${chart.key}"]`);
    const figure = figureFor(chart.key, { y_axis_type: logs.has(chart.key) ? "log" : "linear", y_range: new Bokeh.Range1d({ start: 0, end: 1 }) });
    addMarks(figure);
    if (chart.series[0].source === "workers") wholeNumbers(figure.yaxis, figure.ygrid);
    const parts = chart.series.map((series, at) => addSeries(figure, chart, series, at));
    figure.add_tools(new Bokeh.HoverTool({
      renderers: parts.map((part) => part.lines[0]), mode: "vline", line_policy: "nearest",
      tooltips: [["", "$name"], ["step", "@x{%d}"], ["value", "@y{%.6g}"]], formatters: { "@x": "printf", "@y": "printf" },
    }));
    place(chart.key, element, figure, { chart, parts, figure });
  }

  function drawHeatMap(map) {
    const element = document.querySelector("[data-heat]");
    const ranks = map.values.length, cells = cellsOf(map);
    const figure = figureFor("heat", { height: Math.min(520, Math.max(130, 66 + 14 * ranks)), y_range: new Bokeh.Range1d({ start: ranks - 0.5, end: -0.5 }) });
    const sorted = [...cells.value].sort((one, other) => one - other);
    const low = sorted[0], most = sorted.at(-1), usual = sorted[Math.ceil(0.98 * (sorted.length - 1))];
    const high = usual > low ? usual : most; // a few slow steps leave the rest its colours
    const transform = new Bokeh.LinearColorMapper({ palette: PALETTE, low, high: high > low ? high : low + 1 });
    const color = { field: "value", transform };
    const source = new Bokeh.ColumnDataSource({ data: cells });
    const quads = figure.quad({ field: "left" }, { field: "right" }, { field: "top" }, { field: "bottom" }, { source, fill_color: color, line_color: color, line_width: 0.5 });
    addMarks(figure);
    figure.yaxis.axis_label = "rank";
    wholeNumbers(figure.yaxis, figure.ygrid);
    const tooltips = [["rank", "@rank"], ["node", "@node"], ["steps", "@steps"], ["rows", "@rows{%.6g}"], ["ms", "@value{%.6g}"], ["slowest", "@slowest{%.6g}"]];
    figure.add_tools(new Bokeh.HoverTool({ renderers: [quads], tooltips, formatters: { "@rows": "printf", "@value": "printf", "@slowest": "printf" } }));
    element.querySelector(".low").textContent = `${high > low ? "" : "all "}${format(low)} ms`;
    element.querySelector(".ramp").hidden = element.querySelector(".high").hidden = high <= low;
    element.querySelector(".high").textContent = `${format(high)} ms${most > high ? ` and more, at most ${format(most)} ms` : ""}`;
    place("heat", element, figure, { map, cells, figure });
  }

  // The parts of a step, stacked, with a bar for each bucket of steps.
  function drawParts(parts) {
    const element = document.querySelector("[data-parts]");
    const style = getComputedStyle(document.documentElement);
    const cells = { left: [], right: [], bottom: [], top: [], color: [], part: [], value: [], steps: [] };
    for (let at = 0; at + 1 < parts.edges.length; at++) {
      let sum = 0;
      parts.names.forEach((name, part) => {
        const value = parts.values[part][at];
        if (value === null) return;
        const [first, end] = [parts.edges[at], parts.edges[at + 1]];
        const cell = { left: first, right: end, bottom: sum, top: sum + value, color: style.getPropertyValue(`--p${parts.colors[part]}`).trim(), part: name, value, steps: stepsText(first, end) };
        for (const [key, one] of Object.entries(cell)) cells[key].push(one);
        sum += value;
      });
    }
    const figure = figureFor("parts", { y_range: new Bokeh.Range1d({ start: 0, end: 1 }) });
    const source = new Bokeh.ColumnDataSource({ data: cells });
    const quads = figure.quad({ field: "left" }, { field: "right" }, { field: "top" }, { field: "bottom" }, { source, fill_color: { field: "color" }, line_color: { field: "color" }, line_width: 0.5 });
    addMarks(figure);
    figure.add_tools(new Bokeh.HoverTool({ renderers: [quads], tooltips: [["", "@part"], ["steps", "@steps"], ["ms", "@value{%.6g}"]], formatters: { "@value": "printf" } }));
    place("parts", element, figure, { cells, figure, isStacked: true });
  }

  function stepsText(first, end) { return end - first > 1 ? `${first} to ${end - 1}` : `${first}`; }

  function cellsOf(map) {
    const cells = { left: [], right: [], top: [], bottom: [], value: [], slowest: [], rows: [], rank: [], node: [], steps: [] };
    map.values.forEach((row, rank) => row.forEach((value, at) => {
      if (value === null) return;
      const [first, end] = [map.edges[at], map.edges[at + 1]];
      const cell = { left: first, right: end, top: rank - 0.5, bottom: rank + 0.5, value, slowest: map.slowest[rank][at], rows: map.rows[rank][at], rank, node: map.nodes[rank], steps: stepsText(first, end) };
      for (const [name, one] of Object.entries(cell)) cells[name].push(one);
    }));
    return cells;
  }

  function place(key, element, figure, about) {
    const target = element.querySelector(".plot");
    target.replaceChildren();
    drawn.set(key, about);
    Bokeh.Plotting.show(figure, target);
    fit(about);
  }

  // Sets a chart's y range to what its visible series show between the two ends of the view.
  function fit(about) {
    if (about.isStacked) fitStack(about);
    if (!about.chart) return;
    const isLog = logs.has(about.chart.key);
    const seen = about.parts.filter((part) => part.lines[0].visible).flatMap((part) => visibleValues(part.series));
    const values = isLog ? seen.filter((value) => value > 0) : seen;
    note(about, isLog ? seen.length - values.length : 0);
    if (!values.length) return;
    let low = values.reduce((one, other) => Math.min(one, other)), high = values.reduce((one, other) => Math.max(one, other));
    const pad = isLog ? Math.max(0.05 * Math.log(high / low), 0.05) : 0.05 * (high - low) || Math.abs(high) * 0.05 || 1;
    [low, high] = isLog ? [low / Math.exp(pad), high * Math.exp(pad)] : [low - pad, high + pad];
    about.figure.y_range.setv({ start: low, end: high });
  }

  function fitStack({ cells, figure }) {
    const tops = cells.top.filter((_, at) => cells.right[at] > view.start && cells.left[at] < view.end);
    figure.y_range.setv({ start: 0, end: tops.reduce((one, other) => Math.max(one, other), 0) * 1.05 || 1 });
  }

  // The values in the view, and those at both of its sides, between which a line is drawn.
  function visibleValues(series) {
    const { x, y } = series;
    let first = x.findIndex((value) => value >= view.start), end = x.findIndex((value) => value > view.end);
    if (first < 0) first = x.length;
    if (end < 0) end = x.length;
    return y.slice(Math.max(0, first - 1), end + 1);
  }

  function note(about, count) {
    const element = document.querySelector(`[data-chart="${about.chart.key}"] .note`);
    element.hidden = count === 0;
    element.textContent = count ? `${count} drawn values of 0 or less have no place on a log scale.` : "";
  }

  let isMoving = false;
  function follow(range) {
    if (isMoving) return;
    show(range.start, range.end);
  }

  function show(start, end) {
    isMoving = true;
    const whole = wholeView(), span = Math.min(Math.max(end - start, 2), whole.end - whole.start);
    start = Math.min(Math.max(start, whole.start), whole.end - span);
    view = { start, end: start + span };
    for (const about of drawn.values()) {
      about.figure.x_range.setv({ start: view.start, end: view.end });
      fit(about);
    }
    isMoving = false;
  }

  function move(share, zoom) {
    const span = view.end - view.start, middle = (view.start + view.end) / 2 + share * span;
    show(middle - (span * zoom) / 2, middle + (span * zoom) / 2);
  }

  function onKey(event, key) {
    const actions = {
      ArrowLeft: () => move(-0.2, 1), ArrowRight: () => move(0.2, 1), "+": () => move(0, 0.5), "=": () => move(0, 0.5), "-": () => move(0, 2),
      0: () => show(0, lastStep()), l: () => toggleLog(key),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  function toggleLog(key) {
    const box = document.querySelector(`[data-chart="${key}"] .log input`);
    if (!box) return;
    logs.has(key) ? logs.delete(key) : logs.add(key);
    box.checked = logs.has(key);
    drawChart(drawing.charts.find((chart) => chart.key === key));
  }

  function toggleSeries(key, at, button) {
    const name = `${key}/${at}`;
    hidden.has(name) ? hidden.delete(name) : hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    drawChart(drawing.charts.find((chart) => chart.key === key));
  }

  function smooth(value) {
    smoothing = value;
    document.getElementById("smoothing-value").textContent = value.toFixed(2);
    for (const { parts } of drawn.values()) for (const part of parts || []) {
      if (part.series.isSparse || part.series.isStep) continue;
      part.soft.data = smoothed(part.series);
      part.lines[0].glyph.line_alpha = value > 0 ? 0.3 : 1;
      part.lines[1].visible = value > 0 && part.lines[0].visible;
    }
  }

  function format(value) { return Number(value.toPrecision(4)).toLocaleString("en"); }

  function drawAll() {
    drawing.charts.forEach(drawChart);
    if (drawing.parts) drawParts(drawing.parts);
    if (drawing.heat) drawHeatMap(drawing.heat);
    document.documentElement.dataset.drawn = String(drawn.size);
  }

  function listen() {
    for (const element of document.querySelectorAll("[data-chart], [data-heat], [data-parts]")) {
      const key = element.dataset.chart;
      element.querySelector(".plot").addEventListener("keydown", (event) => onKey(event, key));
      element.querySelector(".log input")?.addEventListener("change", () => toggleLog(key));
      for (const button of element.querySelectorAll("[data-series]")) button.addEventListener("click", () => toggleSeries(key, Number(button.dataset.series), button));
    }
    document.getElementById("smoothing")?.addEventListener("input", (event) => smooth(Number(event.target.value)));
    document.getElementById("reset")?.addEventListener("click", () => show(0, lastStep()));
  }

  window.dpRay = { show, drawn, view: () => view };
  if (!window.Bokeh) return;
  Bokeh.set_log_level("warn");
  listen();
  drawAll();
  dark.addEventListener("change", drawAll);
})();
