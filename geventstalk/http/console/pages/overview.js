// Is it well? Is work flowing? Which tube hurts? The three answers without scrolling, and the latest changes.
import { get, session } from "../api.js";
import { Chart } from "../chart.js";
import { drain } from "../actions.js";
import { MenuButton } from "../dialog.js";
import { html, useMemo, useRef, useState } from "../dom.js";
import { age, bytes, count, counted, exactMoment, moment, rate, share, short } from "../format.js";
import { live, useEvent, useLive, usePoll } from "../live.js";
import { Empty, Fault, Line, Loading, Moment, Pick, useTitle, Stale } from "../parts.js";
import { navigate, tubeHref } from "../route.js";
import { merged, Table } from "../table.js";
import { tubeColumns, withLive } from "../tubelist.js";
import { did } from "./audit.js";

const WORST = 10;
const STEP_MS = { "15m": 5000, "1h": 20_000, "1d": 60_000, "1w": 60_000 };
const TUBE_STEP_MS = 30_000;

export const RATES = [
  { key: "put", label: "put", colour: "ready", width: 2 },
  { key: "reserve", label: "reserved", colour: "muted", line: "dash" },
  { key: "delete", label: "deleted", colour: "reserved", width: 2 },
  { key: "timeout", label: "timed out", colour: "delayed" },
  { key: "bury", label: "buried", colour: "buried" },
];
export const JOBS = ["ready", "reserved", "delayed", "buried"].map((state) => ({ key: state, label: state, colour: state, shape: state, width: 1.8 }));
/** A line for the median, and a band from there to p95. */
const times = (what, colour) => [
  { key: `${what}_p50`, label: "p50", colour, width: 2 },
  { key: `${what}_p95`, label: "p95", colour, line: "band" },
];
const WAITING = times("queued", "ready");
const RUNNING = times("worked", "reserved");

const decade = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1e4) / 10} ms` : `${short(seconds)} s`);
const latency = (seconds) => (seconds !== null && seconds < 0.001 ? "< 1 ms" : age(seconds));
export const ratesNow = (rates) => Object.fromEntries(RATES.map(({ key }) => [key, rates[key].m1]));

export function Overview() {
  useTitle("Overview");
  const { server, problem } = useLive();
  if (!server && problem) return html`<${Fault} problem=${problem} what="The server's figures cannot be shown" />`;
  if (!server) return html`<${Loading} what="Asking the server" />`;
  return html`<div class="overview">
    <h1 class="offscreen">Overview</h1>
    <${Health} server=${server} />
    <${Charts} server=${server} />
    <${Worst} server=${server} />
    <${Latest} />
  </div>`;
}

function Health({ server }) {
  const { memory, journal, node, connections } = server;
  const stands = node && !node.serves;
  return html`<section class="health" aria-label="Health">
    <div class="verdicts" role="status">
      ${["live", "polling"].includes(live.state)
        ? verdicts(server).map((one) => html`<${Verdict} key=${one.about} ...${one} />`)
        : html`<p class="verdict unknown">${live.state === "paused" ? "Paused" : "Nothing is known"} since ${moment(live.at / 1000)}.</p>`}
      ${session.mayOperate && html`<${MenuButton} small quiet label="Actions of the server" items=${() => [
        server.draining ? { text: "End draining", run: () => drain(false) } : { text: "Drain the server…", run: () => drain(true) },
      ]}>⋯</${MenuButton}>`}
    </div>
    <ul class="signs">
      <li title=${`${server.hostname}, process ${server.pid}, since ${exactMoment(server.started)}`}>up <b>${age(server.uptime_s)}</b></li>
      <li>${server.build} <b>${server.version}</b></li>
      ${stands
        ? html`<li>a standby: puts go to the node that leads</li>`
        : html`<li class=${server.draining ? "warn-text" : ""}>${server.draining ? html`<b>draining</b>` : "takes puts"}</li>`}
      <li title=${`${count(connections.producers)} producers, ${count(connections.workers)} workers, ${count(connections.waiting)} wait for a job`}><a href="/connections"><b>${count(connections.open)}</b> ${connections.open === 1 ? "connection" : "connections"}</a></li>
      <li title=${memory.limit_bytes ? `${share(memory.resident_bytes, memory.limit_bytes)} of the limit` : "There is no limit"}>memory <b>${bytes(memory.resident_bytes)}</b>${memory.limit_bytes ? ` of ${bytes(memory.limit_bytes)}` : ""}</li>
      ${memory.bodies && html`<li class=${memory.bodies.bytes > 0.95 * memory.bodies.max_bytes && memory.bodies.refused_puts ? "warn-text" : ""} title=${`Bodies in memory; ${count(memory.bodies.loads)} have come back from the journal, ${count(memory.bodies.refused_puts)} puts were refused for want of memory`}>bodies <b>${bytes(memory.bodies.bytes)}</b> of ${bytes(memory.bodies.max_bytes)}</li>
        <li title="Bodies in the journal only, and the jobs that they belong to">on disk <b>${bytes(memory.bodies.bytes_on_disk)}</b> of ${count(memory.bodies.jobs_on_disk)} ${memory.bodies.jobs_on_disk === 1 ? "job" : "jobs"}</li>`}
      ${journal
        ? html`<li title="Fsync policy of the journal"><a href="/journal">journal <b>${journal.policy}</b></a></li>
          <li title=${`${bytes(journal.disk_free_bytes)} free on the disk`}><b>${bytes(journal.bytes)}</b>${journal.budget_bytes ? ` of ${bytes(journal.budget_bytes)}` : ""}, ${bytes(journal.disk_free_bytes)} free</li>
          <li title=${journal.last_fsync ? exactMoment(journal.last_fsync) : ""}>last fsync ${journal.last_fsync ? html`<b>${age(Math.max(0, server.now - journal.last_fsync))}</b> ago` : "none yet"}</li>`
        : !stands && html`<li class="quiet">no journal: jobs live in memory only</li>`}
    </ul>
  </section>`;
}

/** Three verdicts, about the server, its journal or nodes, and its work: `ill` is true, false, or null for none. */
function verdicts({ well, node, journal }) {
  const stands = node && !node.serves;
  const found = (about, page, ok, none) => {
    const problems = well.problems.filter((one) => about.includes(one.about));
    return { about: about[0], ill: none ? null : problems.length > 0, said: problems.length ? problems : [{ text: ok, page }] };
  };
  return [
    found(["server"], "overview", "The server is well."),
    node
      ? found(["nodes", "journal"], "nodes", "This node leads.", stands)
      : found(["journal"], "journal", journal ? "The journal is well." : "There is no journal.", !journal),
    found(["work"], "tubes", stands ? "The work is done where the other node leads." : "No tube needs attention.", stands),
  ];
}

function Verdict({ ill, said }) {
  const face = { true: "M10 5v6M10 13.8v1.400", false: "M5.8 10.3l2.9 2.9 5.5-6", null: "M6 10h8" }[ill];
  return html`<div class="verdict ${{ true: "ill", false: "well", null: "unknown" }[ill]}">
    <svg viewBox="0 0 20 20" role="img" aria-label=${{ true: "not well", false: "well", null: "to know" }[ill]}><circle cx="10" cy="10" r="9" /><path d=${face} /></svg>
    <ul>${said.map((one) => html`<li key=${one.text}><a href=${`/${one.page === "overview" ? "" : one.page}`}>${one.text}</a></li>`)}</ul>
  </div>`;
}

/** The figures of the server, or of a tube, over the range that the reader picks. `range` is the one of `series`. */
export function useHistory(tube) {
  const [range, setRange] = useState("15m");
  const { data: fresh, problem, reload } = usePoll(`history ${range}`, (signal) => get("/history", { range, tube }, signal), tube ? TUBE_STEP_MS : STEP_MS[range]);
  const latest = useRef(null);
  const drawn = useRef(range);
  if (fresh) [latest.current, drawn.current] = [fresh, range];
  const data = latest.current; // data of another range stays until this one's is here, and the buttons stay, too
  const series = useMemo(() => {
    if (!data) return null;
    const columns = Object.entries(data.series);
    const length = Math.max(0, ...columns.map(([, one]) => one.length));
    // A chart begins at the first figures, so that a young server's is not mostly empty.
    let first = 0;
    while (first < length - 1 && columns.every(([, one]) => one[first] === null)) first += 1;
    return {
      at: Array.from({ length: length - first }, (_, at) => data.to - (length - first - 1 - at) * data.step_s),
      ...Object.fromEntries(columns.map(([key, one]) => [key, one.slice(first)])),
    };
  }, [data]);
  const pick = html`<${Pick} label="How long back" value=${range} onChange=${setRange} options=${[["15m", "15 min"], ["1h", "1 h"], ["1d", "1 d"], ["1w", "1 w"]]} />`;
  return { fresh, series, range: drawn.current, pick, problem, reload };
}

function Charts({ server }) {
  const { fresh, series, pick, problem, reload } = useHistory();
  if (problem && !fresh) return html`<section class="charts"><${Fault} problem=${problem} reload=${reload} what="The charts cannot be shown" /></section>`;
  if (!series) return html`<section class="charts" aria-label="Charts"><div class="plot-room"></div></section>`;
  return html`<section class="charts" aria-label="Charts">
    <${Chart} title="Jobs a second" series=${RATES} data=${series} format=${rate} axis=${short} />
    <${Chart} title="Jobs by state" series=${JOBS} data=${series} format=${count} axis=${short} now=${server.jobs} />
    <${Chart} title="Waiting" note="From ready to reserved" series=${WAITING} data=${series} format=${latency} axis=${decade} log />
    <${Chart} title="Running" note="From reserved to its end" series=${RUNNING} data=${series} format=${latency} axis=${decade} log>${pick}</${Chart}>
  </section>`;
}

function Worst({ server }) {
  const rows = useRef([]);
  const [held, setHeld] = useState(false);
  const heldNow = useRef(false);
  heldNow.current = held;
  const changed = useRef(false); // by the reader: shown at once
  const after = () => {
    changed.current = true;
    reload();
  };
  const { data, problem, at, loading, reload } = usePoll(
    "worst",
    async (signal) => {
      const page = await get("/tubes", { sort: "trouble", limit: WORST, spark: true }, signal);
      rows.current = heldNow.current && !changed.current ? merged(rows.current, page.tubes, 0, (tube) => tube.name, true) : page.tubes;
      changed.current = false;
      return page;
    },
    3000,
  );
  useLive(rows.current.map((tube) => tube.name));
  const shown = rows.current.map((tube) => withLive(tube, live));
  const jobs = server.jobs.ready + server.jobs.delayed + server.jobs.reserved + server.jobs.buried;
  const first = server.totals.put === 0 && jobs === 0;
  return html`<section class="worst">
    <header class="head-line"><h2>Tubes, the worst first</h2><a href="/tubes">All ${data ? counted(data.total, "tube") : "tubes"}</a></header>
    <${Stale} problem=${data && problem} at=${at} reload=${reload} />
    ${first
      ? html`<${FirstJob} server=${server} />`
      : html`<${Table}
          label="Tubes, the worst first" columns=${tubeColumns(after).map((column) => ({ ...column, sort: undefined }))} count=${shown.length} rowAt=${(index) => shown[index]}
          keyOf=${(tube) => tube.name} onHold=${setHeld} onOpen=${(tube) => navigate(tubeHref(tube.name))}
          problem=${problem} reload=${reload} loading=${loading} empty=${html`<${Empty} title="There is no tube." />`}
        />`}
  </section>`;
}

/** A line for a shell that puts a job. */
export function PutLine({ server }) {
  const address = server?.listen?.[0] ?? "127.0.0.1:11300";
  const [, host, port] = /^(.*):(\d+)$/.exec(address) ?? [null, "127.0.0.1", "11300"];
  const near = ["0.0.0.0", "[::]", "::", ""].includes(host) ? "127.0.0.1" : host.replace(/^\[|\]$/g, "");
  const to = address.startsWith("unix:") || address.startsWith("/") ? `nc -N -U ${address.replace(/^unix:/, "")}` : `nc -N ${near} ${port}`;
  return html`<${Line} text=${`printf 'put 0 0 60 5\\r\\nhello\\r\\n' | ${to}`} />`;
}

/** The placeholder without jobs: a line that puts the first one. */
export function FirstJob({ server }) {
  return html`<${Empty} title="No job yet. Put the first one from a shell:"><${PutLine} server=${server} /></${Empty}>`;
}

function Latest() {
  const { data, problem, loading, reload } = usePoll("latest changes", (signal) => get("/audit", { limit: WORST }, signal), 10_000);
  useEvent("audit", reload);
  return html`<section class="latest">
    <header class="head-line"><h2>Latest changes by people</h2><a href="/audit">Audit</a></header>
    ${loading
      ? html`<${Loading} />`
      : problem && !data
        ? html`<${Fault} problem=${problem} reload=${reload} what="The changes cannot be shown" />`
        : data.entries.length
          ? html`<ul class="changes">${data.entries.map((entry) => html`<li key=${entry.number}><${Moment} at=${entry.at} /><span><b>${entry.who}</b> ${did(entry)}</span></li>`)}</ul>`
          : html`<p class="quiet">There are no changes yet.</p>`}
  </section>`;
}
