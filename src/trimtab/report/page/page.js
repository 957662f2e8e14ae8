// Draws the charts of a report as SVG: hover, zoom, log scale. Data: the JSON in #chart-data. Also refreshes a watched page.
"use strict";
(() => {
  const HEIGHT = 220, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22, MIN_DRAG = 6;
  const view = { from: null, to: null, cursor: null, hovered: null, log: {}, hidden: new Set(), drag: null };
  let charts = {};

  const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const color = (series) => `var(--s${series.color % 8})`;
  const dash = (series) => (series.color >= 8 ? "6 4" : "none");
  const swatch = (series) => `<i class="swatch${series.color >= 8 ? " dashed" : ""}" style="color:${color(series)}"></i>`;

  // ---------------------------------------------------------------- numbers
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
  const powerOf = (value) => (value ? Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value)) / 10))) : 0);
  function written(value, unit) {
    if (unit === "bytes") {
      const power = powerOf(value);
      return `${(value / 1024 ** power).toFixed(power ? 2 : 0)} ${BYTES[power]}`;
    }
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(5)));
  }
  function shortly(value, step) {
    const size = Math.abs(value);
    if (!size) return "0";
    const power = (x) => Math.floor(Math.log10(x) + 1e-9);
    const digits = Math.min(15, Math.max(1, power(size) - power(step) + 1)); // so many tell two ticks apart
    if (size >= 1e12 || size < 1e-3 || (step < 1e-3 && digits <= 2)) return value.toExponential(digits - 1).replace(/(\.\d*?)0+e/, "$1e").replace(".e", "e").replace("e+", "e");
    for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(digits))}${letter}`;
    return value.toFixed(Math.max(0, -power(step)));
  }
  function niceStep(span, count) {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
    return power * (part < 1.5 ? 1 : part < 3 ? 2 : part < 7 ? 5 : 10);
  }
  function linearTicks(low, high, count) {
    const step = niceStep(high - low || 1, count), ticks = [];
    const first = Math.ceil(low / step - 1e-9);
    // counted: if the range is tiny beside its values, adding 1 to the first number does not change it
    for (let i = 0; i <= 2 * count && (first + i) * step <= high + step * 1e-9; i++) ticks.push([(first + i) * step, shortly((first + i) * step, step)]);
    return ticks;
  }
  function logTicks(low, high) {
    const decades = Math.log10(high / low), ticks = [];
    const parts = decades < 1.5 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 3] : [1];
    const every = Math.max(1, Math.ceil(decades / 6));
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      if (power % every) continue;
      for (const part of parts) {
        const value = part * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push([value, shortly(value, 10 ** power)]);
      }
    }
    return ticks.length > 2 ? ticks : linearTicks(low, high, 5);
  }

  // ---------------------------------------------------------------- one chart
  const shown = (chart) => chart.series.filter((series) => !view.hidden.has(series.name));
  const inView = ([x]) => (view.from === null || x >= view.from) && (view.to === null || x <= view.to);

  function xRange() {
    if (view.from !== null) return [view.from, view.to];
    const xs = Object.values(charts).flatMap((chart) => chart.series).flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
    const low = xs.reduce((a, b) => Math.min(a, b)), high = xs.reduce((a, b) => Math.max(a, b));
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }
  function values(chart) {
    return shown(chart).flatMap((series) => series.points.filter(inView).map((point) => point[1])).filter((y) => y !== null);
  }
  function yRange(chart, isLog) {
    let found = values(chart);
    if (isLog) found = found.filter((y) => y > 0);
    if (!found.length) return isLog ? [0.1, 1] : [0, 1];
    let low = found.reduce((a, b) => Math.min(a, b)), high = found.reduce((a, b) => Math.max(a, b));
    for (const mark of chart.marks) if (mark.value <= 2.5 * high && mark.value > high) high = mark.value;
    if (isLog) return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
    if (chart.zero) low = Math.min(0, low);
    const room = chart.marks.some((mark) => mark.value === high) ? 0.1 : 0.06; // for the label of a mark at the top
    const pad = (high - low || Math.abs(high) || 1) * room;
    const [floor, top] = chart.bounds || [-Infinity, Infinity];
    return [chart.zero && low === 0 ? 0 : Math.max(low - pad, Math.min(floor, low)), Math.min(high + pad, Math.max(top, high) + pad * 0.3)];
  }
  function scaleOf(chart, width) {
    const isLog = Boolean(view.log[chart.id]);
    const [x0, x1] = xRange(), [y0, y1] = yRange(chart, isLog);
    const inner = width - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
    const place = isLog ? (y) => Math.log(y / y0) / Math.log(y1 / y0) : (y) => (y - y0) / (y1 - y0);
    return {
      isLog, x0, x1, y0, y1, width,
      x: (x) => LEFT + ((x - x0) / (x1 - x0)) * inner,
      y: (y) => TOP + (1 - place(y)) * height,
      step: (pixel) => x0 + ((pixel - LEFT) / inner) * (x1 - x0),
      has: (y) => y !== null && (!isLog || y > 0),
    };
  }
  function pathOf(series, scale) {
    let path = "", isOpen = false;
    const points = series.points, first = points.findIndex(inView);
    if (first < 0) return "";
    let last = points.length - 1;
    while (last > first && !inView(points[last])) last--;
    for (let i = Math.max(0, first - 1); i <= Math.min(points.length - 1, last + 1); i++) {
      const [x, y] = points[i];
      if (!scale.has(y)) { isOpen = false; continue; }
      path += `${isOpen ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`;
      isOpen = true;
    }
    return path;
  }
  function ticksOf(chart, scale) {
    if (scale.isLog && chart.unit !== "bytes") return logTicks(scale.y0, scale.y1);
    if (chart.unit !== "bytes") return linearTicks(scale.y0, scale.y1, 5);
    const unit = 1024 ** powerOf(scale.y1), ticks = scale.isLog ? logTicks : linearTicks;
    return ticks(scale.y0 / unit, scale.y1 / unit, 5).map(([value, text]) => [value * unit, text]);
  }
  function draw(figure) {
    const chart = charts[figure.dataset.chart];
    if (!chart) return;
    const width = Math.max(240, figure.clientWidth), scale = scaleOf(chart, width);
    const unit = chart.unit === "bytes" ? BYTES[powerOf(scale.y1)] : chart.unit;
    const bottom = HEIGHT - BOTTOM;
    let inner = "";
    for (const [value, text] of ticksOf(chart, scale)) {
      const y = scale.y(value).toFixed(1);
      inner += `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}" y1="${y}" y2="${y}"/>`;
      inner += `<text x="${LEFT - 7}" y="${y}" dy="0.33em" text-anchor="end">${text}</text>`;
    }
    const steps = linearTicks(scale.x0, scale.x1, width < 380 ? 4 : 6).filter(([value]) => Number.isInteger(Number(value.toFixed(6))));
    for (const [value, text] of steps) inner += `<text x="${scale.x(value).toFixed(1)}" y="${HEIGHT - 6}" text-anchor="middle">${value < 1e4 ? Math.round(value) : text}</text>`;
    let above = -Infinity, labels = ""; // height of the previous label; labels lie above all lines
    for (const mark of [...chart.marks].sort((one, other) => other.value - one.value)) {
      if (mark.value > scale.y1 || mark.value < scale.y0) continue;
      const y = scale.y(mark.value);
      inner += `<line class="mark" x1="${LEFT}" x2="${width - RIGHT}" y1="${y}" y2="${y}"/>`;
      const label = y - 4 < above + 12 || y < TOP + 14 ? Math.max(y + 13, above + 12) : y - 4;
      labels += `<text class="over-lines" x="${width - RIGHT - 4}" y="${label}" text-anchor="end">${escaped(mark.label)}</text>`;
      above = label;
    }
    const id = `clip-${chart.number}`;
    inner += `<clipPath id="${id}"><rect x="${LEFT - 4}" y="0" width="${width - LEFT - RIGHT + 8}" height="${bottom + 4}"/></clipPath><g clip-path="url(#${id})">`;
    for (const series of shown(chart)) {
      inner += `<path class="curve" d="${pathOf(series, scale)}" style="stroke:${color(series)};stroke-dasharray:${dash(series)}"/>`;
      const visible = series.points.filter(inView);
      const span = visible.length > 1 ? scale.x(visible[visible.length - 1][0]) - scale.x(visible[0][0]) : Infinity;
      if (span / visible.length >= 12)
        for (const [x, y] of visible)
          if (scale.has(y)) inner += `<circle cx="${scale.x(x).toFixed(1)}" cy="${scale.y(y).toFixed(1)}" r="2.5" style="fill:${color(series)}"/>`;
    }
    inner += `</g>${labels}${labelsOf(chart, scale)}<g class="over"></g>`;
    const isCut = scale.isLog && values(chart).some((y) => y <= 0);
    const unitShown = [unit, isCut ? "values ≤ 0 are not drawn" : ""].filter(Boolean).join(", ");
    const canLog = chart.series.some((series) => series.points.some((point) => point[1] > 0));
    const legend = chart.series.length > 1 ? chart.series.map((series) =>
      `<button type="button" data-series="${escaped(series.name)}" aria-pressed="${!view.hidden.has(series.name)}">` +
      `${swatch(series)}${escaped(series.name)}</button>`).join("") : "";
    figure.innerHTML =
      `<figcaption>${escaped(chart.title)} <span class="unit">${escaped(unitShown)}</span>` +
      (canLog ? `<button type="button" data-log aria-pressed="${scale.isLog}" aria-label="logarithmic scale">log</button>` : "") + `</figcaption>` +
      `<div class="legend">${legend}</div>` +
      `<svg viewBox="0 0 ${width} ${HEIGHT}" tabindex="0" role="img" aria-label="${escaped(summary(chart))}">${inner}</svg>` +
      `<div class="tip" role="status" hidden></div>`;
    figure.scale = scale;
    point(figure, false);
  }
  function labelsOf(chart, scale) { // values of curves that are a single point
    const single = shown(chart).map((series) => series.points.filter(inView)).filter((points) => points.length === 1)
      .map(([point]) => point).filter(([, y]) => scale.has(y)).sort((one, other) => other[1] - one[1]);
    if (shown(chart).length > 2) return "";
    return single.map(([x, y], i) => {
      const at = scale.x(x), isRight = at > scale.width - 90, below = scale.y(y) < TOP + 18 || (i > 0 && scale.y(y) - scale.y(single[i - 1][1]) < 28);
      return `<text class="over-lines" x="${(at + (isRight ? 4 : -4)).toFixed(1)}" y="${(scale.y(y) + (below ? 15 : -7)).toFixed(1)}" text-anchor="${isRight ? "end" : "start"}">${written(y, chart.unit)}</text>`;
    }).join("");
  }
  function summary(chart) { // of what the picture shows, for those who cannot see it
    const curves = chart.series.map(({ name, points }) => {
      const known = points.filter((point) => point[1] !== null);
      if (!known.length) return `${name}: no finite value`;
      const [first, last] = [known[0], known[known.length - 1]], ys = known.map((point) => point[1]);
      const ends = [first, last].map(([step, y]) => `${written(y, chart.unit)} at step ${step}`);
      const range = [Math.min, Math.max].map((f) => written(ys.reduce((a, b) => f(a, b)), chart.unit));
      return `${name}: ${known.length > 1 ? `from ${ends[0]} to ${ends[1]}, between ${range[0]} and ${range[1]}` : ends[0]}`;
    });
    return `${chart.title} by step. ${curves.join(". ")}.`;
  }

  // ---------------------------------------------------------------- the cursor
  function nearest(points, step) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && Math.abs(points[low - 1][0] - step) <= Math.abs(points[low][0] - step) ? low - 1 : low;
  }
  function point(figure, isHovered) {
    const chart = charts[figure.dataset.chart], scale = figure.scale, over = figure.querySelector(".over");
    const tip = figure.querySelector(".tip");
    if (!over) return;
    if (view.drag && view.drag.figure === figure) {
      const [a, b] = [view.drag.start, view.drag.end].sort((one, other) => one - other);
      over.innerHTML = `<rect class="zoom" x="${a}" y="${TOP}" width="${b - a}" height="${HEIGHT - TOP - BOTTOM}"/>`;
      tip.hidden = true;
      return;
    }
    if (view.cursor === null || view.cursor < scale.x0 || view.cursor > scale.x1) { over.innerHTML = ""; tip.hidden = true; return; }
    const x = scale.x(view.cursor);
    let marks = `<line class="cursor" x1="${x}" x2="${x}" y1="${TOP}" y2="${HEIGHT - BOTTOM}"/>`, rows = "";
    for (const series of shown(chart)) {
      if (!series.points.length) continue;
      const [step, y] = series.points[nearest(series.points, view.cursor)];
      if (scale.has(y) && inView([step])) marks += `<circle cx="${scale.x(step)}" cy="${scale.y(y)}" r="4" style="fill:${color(series)};stroke:var(--back)"/>`;
      const at = step === view.cursor ? "" : ` (step ${step.toLocaleString("en-US")})`;
      rows += `<tr><td>${swatch(series)}${escaped(series.name)}${at}</td>` +
        `<td>${y === null ? "not finite" : written(y, chart.unit)}</td></tr>`;
    }
    over.innerHTML = marks;
    tip.hidden = !isHovered;
    if (!isHovered) return;
    tip.innerHTML = `step ${view.cursor.toLocaleString("en-US")}<table>${rows}</table>`;
    const box = figure.querySelector("svg").getBoundingClientRect(), ratio = box.width / scale.width;
    const left = x * ratio + 14, room = figure.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, left > room ? x * ratio - tip.offsetWidth - 14 : left)}px`;
    tip.style.top = `${box.top - figure.getBoundingClientRect().top + 12}px`;
  }
  const figures = () => [...document.querySelectorAll("figure[data-chart]")];
  // drawing replaces elements: returns a function that gives the focus back
  function keepFocus() {
    const active = document.activeElement, figure = active && active.closest("figure[data-chart]");
    if (!figure) return () => {};
    const { chart } = figure.dataset, { series } = active.dataset;
    return () => {
      const now = figures().find((each) => each.dataset.chart === chart);
      const buttons = now ? [...now.querySelectorAll("[data-series]")] : [];
      const found = series === undefined ? now && now.querySelector("log" in active.dataset ? "[data-log]" : "svg") : buttons.find((each) => each.dataset.series === series);
      if (found) found.focus({ preventScroll: true });
    };
  }
  const drawAll = () => { const giveBack = keepFocus(); figures().forEach(draw); giveBack(); };
  function pointAll(hovered) {
    view.hovered = hovered ? hovered.dataset.chart : null;
    figures().forEach((figure) => point(figure, figure === hovered));
  }
  function moveTo(figure, step) {
    const steps = shown(charts[figure.dataset.chart]).flatMap((series) =>
      series.points.length ? [series.points[nearest(series.points, step)][0]] : []);
    view.cursor = steps.length ? steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a)) : null;
    pointAll(figure);
  }
  function zoomTo(from, to) {
    view.from = from; view.to = to; view.cursor = null;
    for (const button of document.querySelectorAll("[data-reset]")) button.hidden = from === null;
    drawAll();
  }

  function zoomBy(figure, factor) { // around the cursor, or the middle
    const [low, high] = xRange(), cursor = view.cursor, middle = cursor === null ? (low + high) / 2 : cursor;
    const half = Math.max(1, (high - low) * factor) / 2;
    view.from = view.to = null;
    const [first, last] = xRange();
    if (2 * half >= last - first) zoomTo(null, null);
    else {
      const from = Math.min(Math.max(first, middle - half), last - 2 * half);
      zoomTo(from, from + 2 * half);
    }
    view.cursor = cursor;
    pointAll(figure);
  }

  // ---------------------------------------------------------------- events, delegated: a refresh replaces figures
  const placeOf = (event) => {
    const svg = event.target.closest && event.target.closest("figure[data-chart] svg");
    if (!svg) return null;
    const figure = svg.closest("figure"), box = svg.getBoundingClientRect(), width = figure.scale.width;
    const pixel = ((event.clientX - box.left) / box.width) * width;
    return { figure, pixel: Math.min(width - RIGHT, Math.max(LEFT, pixel)) };
  };
  addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (view.drag) {
      if (place && place.figure === view.drag.figure) view.drag.end = place.pixel;
      if (Math.abs(view.drag.end - view.drag.start) >= MIN_DRAG) point(view.drag.figure, false);
    } else if (place) moveTo(place.figure, place.figure.scale.step(place.pixel));
    else if (view.cursor !== null && event.pointerType === "mouse") { view.cursor = null; pointAll(null); }
  });
  addEventListener("pointerdown", (event) => {
    const place = placeOf(event);
    if (!place && view.cursor !== null && event.pointerType !== "mouse") { view.cursor = null; pointAll(null); }
    if (place && event.button === 0) view.drag = { figure: place.figure, start: place.pixel, end: place.pixel };
  });
  addEventListener("pointerup", () => {
    const drag = view.drag;
    view.drag = null;
    if (!drag) return;
    const [a, b] = [drag.start, drag.end].sort((one, other) => one - other);
    if (b - a >= MIN_DRAG) zoomTo(drag.figure.scale.step(a), drag.figure.scale.step(b));
    else moveTo(drag.figure, drag.figure.scale.step(drag.end));
  });
  addEventListener("pointercancel", () => { view.drag = null; });
  addEventListener("dblclick", (event) => { if (placeOf(event)) zoomTo(null, null); });
  addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if ("reset" in button.dataset) zoomTo(null, null);
    if ("log" in button.dataset) {
      const figure = button.closest("figure"), id = figure.dataset.chart;
      view.log[id] = !view.log[id];
      drawAll();
    }
    if (button.dataset.series !== undefined) {
      const name = button.dataset.series;
      if (!view.hidden.delete(name)) view.hidden.add(name);
      drawAll();
    }
  });
  addEventListener("keydown", (event) => {
    const figure = event.target.closest && event.target.closest("figure[data-chart]");
    if (!figure || event.target.tagName !== "svg" || event.ctrlKey || event.metaKey || event.altKey) return;
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (factor) zoomBy(figure, factor);
    if (event.key === "Escape" || event.key === "0") zoomTo(null, null);
    const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!turn) return;
    const steps = [...new Set(shown(charts[figure.dataset.chart]).flatMap((series) => series.points.filter(inView).map((p) => p[0])))];
    steps.sort((a, b) => a - b);
    const at = view.cursor === null ? -1 : steps.indexOf(view.cursor);
    const next = Math.min(steps.length - 1, Math.max(0, at < 0 ? (turn > 0 ? 0 : steps.length - 1) : at + turn));
    if (steps.length) { view.cursor = steps[next]; pointAll(figure); }
    event.preventDefault();
  });

  // ---------------------------------------------------------------- start and refresh
  function start() {
    charts = {};
    for (const [number, chart] of JSON.parse(document.getElementById("chart-data").textContent).charts.entries()) {
      charts[chart.id] = Object.assign(chart, { number });
      if (!(chart.id in view.log)) view.log[chart.id] = chart.log;
    }
    drawAll();
    for (const button of document.querySelectorAll("[data-reset]")) button.hidden = view.from === null;
  }
  start();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });

  let tagShown = document.documentElement.dataset.watch;
  async function refresh() {
    try {
      const reply = await fetch(location.href, { cache: "no-cache" });
      if (reply.ok) {
        const tag = reply.headers.get("ETag");
        if (tag !== tagShown) {
          const next = new DOMParser().parseFromString(await reply.text(), "text/html");
          const giveBack = keepFocus(), open = [...document.querySelectorAll("details")].map((details) => details.open);
          document.querySelector("main").replaceWith(next.querySelector("main"));
          document.getElementById("chart-data").textContent = next.getElementById("chart-data").textContent;
          document.title = next.title;
          document.querySelectorAll("details").forEach((details, i) => { details.open = Boolean(open[i]); });
          start();
          pointAll(figures().find((figure) => figure.dataset.chart === view.hovered));
          giveBack();
        }
        tagShown = tag;
      }
    } catch { /* the server has ended: the page stays as it is */ }
    setTimeout(refresh, 2000);
  }
  if (tagShown !== undefined) setTimeout(refresh, 2000);
})();
