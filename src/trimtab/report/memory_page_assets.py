"""Style and script of a memory page, which are embedded in it: a page has no external references."""

from trimtab.report.step_record import ALLOCATED

# Parts in the order in which they are stacked: on white, and on a dark background.
LIGHT = dict(zip(ALLOCATED, ("#57606a", "#bc4c00", "#8250df", "#54aeff", "#1a7f37", "#d4a72c"), strict=True))
DARK = dict(zip(ALLOCATED, ("#8c959f", "#f0883e", "#a371f7", "#388bfd", "#3fb950", "#e3b341"), strict=True))


def css_name(part: str) -> str:
    """The name of a part in class names and variables."""
    return part.replace(" ", "-")


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{css_name(part)}: {color};" for part, color in colors.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #ffffff; --line: #d1d9e0;
  --shade: #f1f3f5; --strong: #cf222e; {_variables(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ --text: #e6edf3; --muted: #9198a1; --page: #0d1117;
  --line: #3d444d; --shade: #181d24; --strong: #ff7b72; {_variables(DARK)} }} }}
"""
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
figure { margin: 0.75rem 0 0; break-inside: avoid; }
.frame { display: grid; grid-template-columns: 4.6rem 1fr; grid-template-rows: 1.5rem auto 1.5rem; }
.stages { grid-column: 2; position: relative; font-size: 0.85rem; color: var(--muted); }
.stages span { position: absolute; overflow: hidden; white-space: nowrap; text-align: center; height: 1.5rem;
  container-type: inline-size; }
.stages b, .stages i { font-weight: 400; font-style: normal; }
.stages i { display: none; }
@container (max-width: 4.2rem) { .stages b { display: none; } .stages i { display: inline; } }
@container (max-width: 1.7rem) { .stages i { display: none; } }
.heights { position: relative; font-size: 0.8rem; color: var(--muted); font-variant-numeric: tabular-nums; }
.heights span { position: absolute; right: 0.5rem; transform: translateY(50%); white-space: nowrap; }
.times { grid-column: 2; position: relative; font-size: 0.8rem; color: var(--muted); }
.times span { position: absolute; transform: translateX(-50%); white-space: nowrap; top: 0.2rem; }
@media (max-width: 30rem) { .times span:nth-child(even) { display: none; } }
.times span:first-child { transform: none; }
.times span:last-child { transform: translateX(-100%); }
.plot { position: relative; height: clamp(15rem, 42vw, 25rem); border: solid var(--line); border-width: 0 0 1px 1px;
  touch-action: pan-y; }
.plot:focus-visible { outline: 2px solid var(--muted); outline-offset: 2px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.area { fill: var(--color); }
.shade { fill: var(--shade); }
.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
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
  .tip, .cursor { display: none !important; }
}
"""
)

SCRIPT = """
"use strict";
const unit = mib => mib >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(mib < 10 ? 2 : 1) + " MiB";
for (const plot of document.querySelectorAll(".plot[data-points]")) {
  const data = JSON.parse(document.getElementById(plot.dataset.points).textContent);
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  let chosen = -1;
  const line = (name, value, part) => {
    const [row, left, right] = ["div", "span", "span"].map(name => document.createElement(name));
    if (part) { const swatch = document.createElement("i"); swatch.className = "swatch " + part; left.append(swatch); }
    left.append(name); right.textContent = value; row.append(left, right); return row;
  };
  const show = index => {
    chosen = Math.max(0, Math.min(data.at.length - 1, index));
    const at = data.at[chosen], parts = data.parts[chosen];
    tip.replaceChildren(line(data.stages[data.stage[chosen]], data.time[chosen]),
      line("in use", unit(parts.reduce((a, b) => a + b, 0))));
    for (let part = parts.length - 1; part >= 0; part--)
      if (parts[part] > 0) tip.append(line(data.names[part], unit(parts[part]), data.names[part].replaceAll(" ", "-")));
    cursor.style.left = 100 * at + "%";
    tip.style.left = at < 0.5 ? "auto" : "0.25rem"; tip.style.right = at < 0.5 ? "0.25rem" : "auto";
    tip.style.display = cursor.style.display = "block";
  };
  const hide = () => { tip.style.display = cursor.style.display = "none"; chosen = -1; };
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    let index = 0; while (index + 1 < data.at.length && data.at[index + 1] <= x) index++;
    show(index);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") hide();
    if (step) { show(chosen < 0 ? data.peak : chosen + step); event.preventDefault(); }
  });
}
"""
