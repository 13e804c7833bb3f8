// Charts over time (uPlot draws them) and sparklines. A chart takes its series and their values; it knows no server.
import { html, useEffect, useRef, useState } from "./dom.js";
import { clock, moment } from "./format.js";
import { Shape, STATES } from "./parts.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 168;
const SPAN_MIN_S = 60;
const DASH = { solid: undefined, dash: [5, 4] };
const BAND = 0.22; // how opaque

/** Returns a custom property as a colour of canvas, in the present theme. */
function colour(name) {
  const probe = document.createElement("span");
  probe.className = `probe probe-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function useTheme() {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const changed = () => setTurn((n) => n + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", changed);
    addEventListener("theme", changed);
    return () => {
      dark.removeEventListener("change", changed);
      removeEventListener("theme", changed);
    };
  }, []);
  return turn;
}

/** The same colour, mostly transparent. */
const soft = (name) => colour(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${BAND})`);

/**
 * series: {key, label, colour, line, width, shape}, where the line `band` fills the room down to the one before; data: {at: [unix], [key]: [number|null]}; format(value): text.
 * log: a logarithmic scale. now: {key: value}, the legend while the pointer is elsewhere.
 */
export function Chart({ title, note, series, data, format, axis = format, log = false, now, children }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [pointed, setPointed] = useState(null);
  const theme = useTheme();
  const names = series.map((one) => one.key).join();
  const known = data.at.length > 1 && series.some((one) => data[one.key]?.some((value) => value !== null && value !== undefined));

  const columns = () => [
    data.at,
    ...series.map((one) => (data[one.key] ?? data.at.map(() => null)).map((value) => (log && value !== null ? Math.max(value, 1e-4) : value))),
  ];

  useEffect(() => {
    if (!known) return;
    const ink = colour("muted");
    const line = { stroke: colour("line"), width: 1 };
    const text = { stroke: ink, font: `11px ${getComputedStyle(document.body).fontFamily}`, ticks: { show: false } };
    const chart = new uPlot(
      {
        width: place.current.clientWidth || 300,
        height: HEIGHT,
        padding: [8, 28, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false, setScale: false }, points: { size: 6 }, y: false, sync: { key: "time" } },
        scales: {
          x: { time: true, range: (_, low, high) => [Math.min(low ?? 0, (high ?? 0) - SPAN_MIN_S), high ?? 1] },
          y: log
            ? { distr: 3, log: 10, range: (_, low, high) => spread(low, high) }
            : { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.08] },
        },
        axes: [
          { ...text, grid: { show: false }, space: 70, size: 26, values: (_, moments) => ticks(moments) },
          { ...text, grid: line, space: 30, size: 58, gap: 4, ...(log && { splits: decades }), values: (_, values) => values.map((value) => (value === null ? "" : axis(value))) },
        ],
        series: [
          {},
          ...series.map((one) => ({
            stroke: one.line === "band" ? null : colour(one.colour),
            width: one.line === "band" ? 0 : (one.width ?? 1.5),
            dash: DASH[one.line ?? "solid"],
            points: { show: false },
            spanGaps: false,
          })),
        ],
        bands: series.flatMap((one, at) => (one.line === "band" ? [{ series: [at + 1, at], fill: soft(one.colour) }] : [])),
        hooks: { setCursor: [(self) => setPointed(self.cursor.idx ?? null)] },
      },
      columns(),
      place.current,
    );
    plot.current = chart;
    const sized = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    });
    sized.observe(place.current);
    return () => {
      sized.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [names, known, theme, log]);
  useEffect(() => plot.current?.setData(columns()), [data]);

  const last = data.at.length - 1;
  const at = pointed !== null && pointed <= last ? pointed : null;
  const value = (key) => (at !== null ? data[key]?.[at] : now ? now[key] : data[key]?.[last]);
  const entry = (one) => html`<span key=${one.key} class="entry"><${Mark} ...${one} />${one.label} <b>${format(value(one.key) ?? null)}</b></span>`;
  return html`<figure class="chart">
    <figcaption><h2 title=${note}>${title}</h2>${at !== null && html`<span class="at">${moment(data.at[at])}</span>`}${children}</figcaption>
    <div class="legend">${series.map(entry)}</div>
    ${known
      ? html`<div ref=${place} class="plot" role="img" aria-label=${`${title} over time. Now: ${series.map((one) => `${one.label} ${format((now ?? {})[one.key] ?? data[one.key]?.[last] ?? null)}`).join(", ")}.`}></div>`
      : html`<div class="plot blank">No figures yet.</div>`}
  </figure>`;
}

/** Days where several are shown, else times of day. */
function ticks(moments) {
  const span = moments.at(-1) - moments[0];
  return moments.map((at) => (span > 86_400 ? new Date(at * 1000).toLocaleDateString("en", { weekday: "short", day: "numeric" }) : clock(at, span < 120)));
}

/** The powers of ten of a scale. */
function decades(_, axis, low, high) {
  const found = [];
  for (let power = Math.round(Math.log10(low)); power <= Math.round(Math.log10(high)); power += 1) found.push(10 ** power);
  return found;
}

function spread(low, high) {
  const from = 10 ** Math.floor(Math.log10(Math.max(low ?? 0.001, 1e-4)));
  const to = 10 ** Math.ceil(Math.log10(Math.max(high ?? 1, from * 10)));
  return [from, to > from ? to : from * 10];
}

function Mark({ colour: name, line = "solid", width = 1.5, shape }) {
  if (STATES.includes(shape)) return html`<${Shape} state=${shape} />`;
  if (line === "band") return html`<svg class="mark ink-${name}" viewBox="0 0 16 8" aria-hidden="true"><path d="M0 4h16" stroke="currentColor" stroke-width="8" stroke-opacity=${BAND} /></svg>`;
  const dash = DASH[line]?.join(" ");
  return html`<svg class="mark ink-${name}" viewBox="0 0 16 8" aria-hidden="true"><path d="M0 4h16" stroke="currentColor" stroke-width=${width + 0.5} stroke-dasharray=${dash} /></svg>`;
}

/** Some values as a small line. */
export function Spark({ values, label }) {
  if (!values?.some((value) => value !== null)) return html`<span class="none">–</span>`;
  const width = 90;
  const height = 20;
  const top = Math.max(1, ...values.map((value) => value ?? 0));
  const step = width / Math.max(1, values.length - 1);
  let path = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${(at * step).toFixed(1)} ${(height - 1.5 - ((height - 3) * value) / top).toFixed(1)}`;
    pen = "L";
  });
  return html`<svg class="spark" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img" aria-label=${label}><path d=${path} /></svg>`;
}
