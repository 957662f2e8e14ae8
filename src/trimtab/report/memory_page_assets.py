"""Style and script of a memory page, which are embedded in it: a page has no external references."""

from trimtab.report.part_colors import PART_COLORS, css_name
from trimtab.report.step_record import ALLOCATED

STYLE = (
    """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #ffffff; --line: #d1d9e0;
  --shade: #f1f3f5; --strong: #cf222e; }
@media screen and (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9198a1; --page: #0d1117;
  --line: #3d444d; --shade: #181d24; --strong: #ff7b72; } }
"""
    + PART_COLORS
    + "".join(f".{css_name(part)} {{ --color: var(--{css_name(part)}); }}\n" for part in ALLOCATED)
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.25rem; }
p { margin: 0.25rem 0 0.75rem; }
.muted, small { color: var(--muted); }
small { font-size: 0.85em; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 0.88em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; margin: 0.75rem 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.problem { border-left: 3px solid var(--strong); padding: 0.3rem 0.75rem; background: var(--shade);
  white-space: pre-line; }
figure { margin: 0.75rem 0 0; break-inside: avoid; }
.frame { display: grid; grid-template-columns: 4.6rem 1fr; grid-template-rows: 1.5rem auto 1.5rem; }
.stages { grid-column: 2; position: relative; font-size: 0.85rem; color: var(--muted); }
.stages button { position: absolute; height: 1.5rem; padding: 0; border: 0; background: none; color: inherit;
  font: inherit; white-space: nowrap; display: flex; justify-content: center; container-type: inline-size;
  cursor: zoom-in; }
.stages button:last-child { justify-content: flex-end; }
.stages button:hover, .stages .alone { color: var(--text); }
.stages button[hidden] { display: none; }
.stages .alone { cursor: zoom-out; }
.stages b, .stages i { font-weight: 400; font-style: normal; }
.stages b { margin: 0 auto; }
.stages i { display: none; }
@container (max-width: 4.2rem) { .stages b { display: none; } .stages i { display: inline; } }
.heights { position: relative; font-size: 0.8rem; color: var(--muted); font-variant-numeric: tabular-nums; }
.heights span { position: absolute; right: 0.5rem; transform: translateY(50%); white-space: nowrap; }
.times { grid-column: 2; position: relative; font-size: 0.8rem; color: var(--muted); }
.times span { position: absolute; transform: translateX(-50%); white-space: nowrap; top: 0.2rem; }
@media (max-width: 30rem) { code { font-size: 0.8em; } .times span:nth-child(even) { display: none; } }
.times span:first-child { transform: none; }
.times span:last-child { transform: translateX(-100%); }
.plot { position: relative; overflow: hidden; cursor: crosshair;
  height: clamp(15rem, 42vw, 25rem); border: solid var(--line); border-width: 0 0 1px 1px;
  touch-action: pan-y; }
.plot:focus-visible { outline: 2px solid var(--muted); outline-offset: 2px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.area { fill: var(--color); }
.shade { fill: var(--shade); }
.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.border { stroke: var(--text); stroke-width: 1; stroke-dasharray: 1 3; vector-effect: non-scaling-stroke; }
.limit { stroke: var(--strong); stroke-width: 1.5; stroke-dasharray: 6 4; vector-effect: non-scaling-stroke; }
.peak { position: absolute; transform: translate(-50%, -100%); font-weight: 600; font-size: 0.85rem;
  white-space: nowrap; padding-bottom: 2px;
  text-shadow: 0 0 3px var(--page), 0 0 3px var(--page), 0 0 3px var(--page); }
.peak::after { content: ""; position: absolute; left: 50%; bottom: -3px; width: 6px; height: 6px; margin-left: -3px;
  border-radius: 50%; background: var(--text); }
.peak.left { transform: translate(0, -100%); } .peak.left::after { left: 0; }
.peak.right { transform: translate(-100%, -100%); } .peak.right::after { left: 100%; }
.limit-name { position: absolute; right: 0.25rem; font-size: 0.8rem; color: var(--strong); background: var(--page);
  padding: 0 0.25rem; transform: translateY(50%); border-radius: 3px; }
.chosen { position: absolute; top: 0; bottom: 0; background: var(--text); opacity: 0.15; display: none; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--text); display: none; }
.tip { position: absolute; top: 0.25rem; z-index: 2; display: none; pointer-events: none; min-width: 12.5rem;
  padding: 0.4rem 0.6rem; font-size: 0.8rem; line-height: 1.4; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; box-shadow: 0 2px 8px rgb(0 0 0 / 0.2); font-variant-numeric: tabular-nums; }
.tip div { display: flex; justify-content: space-between; gap: 1rem; }
.swatch { display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.4em; border-radius: 2px;
  background: var(--color); print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.bar { display: flex; height: 2.5rem; margin: 0.75rem 0; border-radius: 4px; overflow: hidden; }
.bar span { background: var(--color); print-color-adjust: exact; -webkit-print-color-adjust: exact; }
table { border-collapse: collapse; width: 100%; margin: 0.75rem 0; font-size: 0.92rem; }
th { text-align: left; font-weight: 500; color: var(--muted); }
th, td { padding: 0.3rem 0.75rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr { break-inside: avoid; }
tr.sum td { font-weight: 600; }
td:last-child, th:last-child { padding-right: 0; }
.named { display: flex; align-items: baseline; gap: 0.1rem; }
.named .swatch { flex: none; }
.tensors td:first-child, .tensors th:first-child { width: 1%; }
@media print {
  body { max-width: none; padding: 0; }
  .plot { height: 18rem; }
  .tip, .cursor, .chosen { display: none !important; }
}
"""
)

SCRIPT = """
"use strict";
const unit = mib => mib >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(mib < 10 ? 2 : 1) + " MiB";
const duration = s => !s ? "0" : s >= 1 ? s.toFixed(2) + " s"
  : s >= 1e-3 ? +(1e3 * s).toPrecision(3) + " ms" : +(1e6 * s).toPrecision(3) + " µs";
for (const plot of document.querySelectorAll(".plot[data-points]")) {
  const data = JSON.parse(document.getElementById(plot.dataset.points).textContent);
  const [tip, cursor, chosen, peak] = [".tip", ".cursor", ".chosen", ".peak"].map(name => plot.querySelector(name));
  const frame = plot.closest(".frame"), svg = plot.querySelector("svg"), box = svg.viewBox.baseVal;
  const width = box.width, stages = [...frame.querySelectorAll(".stages button")];
  const times = [...frame.querySelectorAll(".times span")];
  let shown = -1, begin = 0, end = 1, drag = null;
  const place = at => (at - begin) / (end - begin);
  const look = (from, to) => {
    begin = from; end = to;
    svg.setAttribute("viewBox", [width * begin, 0, width * (end - begin), box.height].join(" "));
    for (const stage of stages) {
      const from = +stage.dataset.begin, to = +stage.dataset.end;
      const [first, last] = [from, to].map(at => Math.max(0, Math.min(1, place(at))));
      stage.style.left = 100 * first + "%"; stage.style.width = 100 * (last - first) + "%";
      stage.hidden = from === to ? from < begin || from > end : to <= begin || from >= end;
      stage.classList.toggle("alone", from === begin && to === end);
    }
    peak.style.left = 100 * place(data.at[data.peak]) + "%";
    if (data.seconds) times.forEach((text, number) => {
      text.textContent = duration((begin + (end - begin) * number / (times.length - 1)) * data.seconds);
    });
    hide();
  };
  const line = (name, value, part) => {
    const [row, left, right] = ["div", "span", "span"].map(name => document.createElement(name));
    if (part) { const swatch = document.createElement("i"); swatch.className = "swatch " + part; left.append(swatch); }
    left.append(name); right.textContent = value; row.append(left, right); return row;
  };
  const show = index => {
    shown = Math.max(0, Math.min(data.at.length - 1, index));
    const at = data.at[shown], parts = data.parts[shown], x = Math.max(0, place(at));
    tip.replaceChildren(line(data.stages[data.stage[shown]], data.seconds ? duration(at * data.seconds) : ""),
      line("in use", unit(parts.reduce((a, b) => a + b, 0))));
    for (let part = parts.length - 1; part >= 0; part--)
      if (parts[part] > 0) tip.append(line(data.names[part], unit(parts[part]), data.names[part].replaceAll(" ", "-")));
    cursor.style.left = 100 * x + "%";
    tip.style.left = x < 0.5 ? "auto" : "0.25rem"; tip.style.right = x < 0.5 ? "0.25rem" : "auto";
    tip.style.display = cursor.style.display = "block";
  };
  const hide = () => { tip.style.display = cursor.style.display = "none"; shown = -1; };
  const share = event => {
    const area = plot.getBoundingClientRect();
    return begin + (end - begin) * Math.max(0, Math.min(1, (event.clientX - area.left) / area.width));
  };
  plot.addEventListener("pointermove", event => {
    const x = share(event);
    if (drag !== null) {
      chosen.style.left = 100 * place(Math.min(x, drag)) + "%";
      chosen.style.width = 100 * Math.abs(x - drag) / (end - begin) + "%"; chosen.style.display = "block";
    }
    let index = 0; while (index + 1 < data.at.length && data.at[index + 1] <= x) index++;
    show(index);
  });
  plot.addEventListener("pointerdown", event => {
    if (event.pointerType !== "mouse" || event.button) return;
    drag = share(event); event.preventDefault(); plot.focus();
  });
  addEventListener("pointerup", event => {
    if (drag === null) return;
    const [from, to] = [drag, share(event)].sort((a, b) => a - b);
    drag = null; chosen.style.display = "none";
    if (to - from > 0.01 * (end - begin)) look(from, to);
  });
  plot.addEventListener("dblclick", () => look(0, 1));
  for (const stage of stages) stage.addEventListener("click", () =>
    stage.classList.contains("alone") || stage.dataset.begin === stage.dataset.end ? look(0, 1)
      : look(+stage.dataset.begin, +stage.dataset.end));
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") look(0, 1);
    if (step) { show(shown < 0 ? data.peak : shown + step); event.preventDefault(); }
  });
  addEventListener("beforeprint", () => look(0, 1));
}
"""
