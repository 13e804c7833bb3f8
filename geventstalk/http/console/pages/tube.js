// One tube: its jobs by state with the oldest and the next of each, its figures over time, its users and watchers.
import { get, session, tubePath } from "../api.js";
import { kickTube, pauseTube, putJob, setPause } from "../actions.js";
import { Chart } from "../chart.js";
import { MenuButton } from "../dialog.js";
import { html, useRef } from "../dom.js";
import { age, count, counted, rate, short, signed } from "../format.js";
import { filterOf } from "../filter.js";
import { live, useLive, usePoll } from "../live.js";
import { Age, Empty, Fault, Loading, Moment, Num, Plain, useTitle, Stale, State, STATES, Term } from "../parts.js";
import { connectionHref, jobHref, jobsHref } from "../route.js";
import { tubeItems } from "../tubelist.js";
import { JOBS, RATES, ratesNow, useHistory } from "./overview.js";

const LASTING_S = 4_294_967_295; // a pause that only a change of the policy ends
const KEEP_S = 900;
const GAP_S = 10;
const KEYS = ["at", ...[...JOBS, ...RATES].map(({ key }) => key)];
const NAMES = ["put", "reserve", "delete", "timeout", "bury"];

/** The figures of a tube since its page was opened, after the server's figures of the time before. */
function useTrail(tube, range, known) {
  const trail = useRef(null);
  const now = Date.now() / 1000;
  const last = trail.current?.at.at(-1) ?? 0;
  if (tube && now - last >= 0.9) {
    const before = now - last < GAP_S ? trail.current : null; // the server has the figures that the page has missed
    const from = before?.at.filter((at) => at < now - KEEP_S).length;
    const figures = { at: now, ...tube.jobs, ...ratesNow(tube.rates) };
    trail.current = Object.fromEntries(KEYS.map((key) => [key, [...(before?.[key].slice(from) ?? []), figures[key]]]));
  }
  if (range !== "15m") return known ?? { at: [] };
  if (!known || !trail.current) return trail.current ?? { at: [] };
  const end = known.at.filter((at) => at < trail.current.at[0]).length;
  return Object.fromEntries(KEYS.map((key) => [key, [...known[key].slice(0, end), ...trail.current[key]]]));
}

export function Tube({ name }) {
  useTitle(name);
  const names = useRef([name]).current;
  useLive(names);
  const { data, problem, at, loading, reload } = usePoll(
    `tube ${name}`,
    (signal) => get(tubePath(name), {}, signal),
    3000,
  );
  const fresh = data && live.tubes.get(name);
  const tube = fresh && live.at > at - 1500 ? { ...data, ...fresh } : data;
  const past = useHistory(name);
  const shown = useTrail(tube, past.range, past.series);
  if (!tube && problem?.status === 404) return html`<${Gone} name=${name} reload=${reload} />`;
  if (!tube && problem) return html`<${Fault} problem=${problem} reload=${reload} what="The tube cannot be shown" />`;
  if (loading) return html`<${Loading} />`;
  const gone = problem?.status === 404;
  const byPolicy = tube.paused_s === LASTING_S;
  const need = tube.jobs.buried ? "kick" : tube.paused_s > 0 ? "resume" : "put"; // what the tube needs most
  const marked = (action) => (action === need ? "primary" : "");
  return html`<article class="tube">
    <div class="page-head">
      <h1><span class="kind">Tube</span> ${name}</h1>
      ${gone && html`<span class="tag warn">gone since ${age((Date.now() - at) / 1000)}</span>`}
      ${byPolicy ? html`<a class="tag warn" href="/policies">paused by its policy</a>` : tube.paused_s > 0 && html`<span class="tag warn">paused, ${age(tube.pause_left_s)} left</span>`}
      <div class="push">
        <a class="button" href=${jobsHref(filterOf(name))}>Jobs</a>
        ${session.mayChange && html`
          <button type="button" class=${marked("put")} onClick=${() => putJob({ tube: name }, reload)}>Put a job…</button>
          ${byPolicy ? null : tube.paused_s > 0
            ? html`<button type="button" class=${marked("resume")} onClick=${() => setPause(tube, 0, reload)}>Resume</button>`
            : html`<button type="button" onClick=${() => pauseTube(tube, reload)}>Pause…</button>`}
          <button type="button" class=${marked("kick")} disabled=${!tube.jobs.buried} onClick=${() => kickTube(tube, reload)}>Kick…</button>
          <${MenuButton} label="More actions" items=${() => tubeItems(tube, reload, { here: true })}>More ▾</${MenuButton}>`}
      </div>
    </div>
    <${Stale} problem=${gone ? null : problem} at=${at} reload=${reload} />
    <section class="states" aria-label="Jobs by state">${STATES.map((state) => html`<${StateBlock} key=${state} tube=${tube} state=${state} />`)}</section>
    <section class="charts two" aria-label="Charts">
      ${past.problem && !past.fresh && html`<${Fault} problem=${past.problem} reload=${past.reload} what="What was before cannot be shown" />`}
      <${Chart} title="Jobs by state" series=${JOBS} data=${shown} format=${count} axis=${short} now=${tube.jobs} />
      <${Chart} title="Jobs a second" series=${RATES} data=${shown} format=${rate} axis=${short} now=${ratesNow(tube.rates)}>${past.pick}</${Chart}>
    </section>
    <div class="thirds">
      <section><h2>Rates</h2><table class="plain">
        <thead><tr><th scope="col">jobs</th><th scope="col" class="right">a second, 1 min</th><th scope="col" class="right">15 min</th><th scope="col" class="right">in all</th></tr></thead>
        <tbody>${NAMES.map((key) => html`<tr key=${key}><th scope="row">${key}</th><td class="right">${rate(tube.rates[key].m1)}</td><td class="right">${rate(tube.rates[key].m15)}</td><td class="right">${count(tube.totals[key])}</td></tr>`)}
        <tr><th scope="row">growth</th><td class="right">${signed(tube.growth)}</td><td></td><td></td></tr></tbody>
      </table></section>
      <section><h2>Time</h2><table class="plain">
        <thead><tr><th scope="col">a job is</th><th scope="col" class="right">p50</th><th scope="col" class="right">p95</th><th scope="col" class="right">p99</th><th scope="col" class="right">jobs</th></tr></thead>
        <tbody>${[["in queue", "queued"], ["at work", "worked"]].map(([label, key]) => html`<tr key=${key}><th scope="row">${label}</th>${["p50", "p95", "p99"].map((q) => html`<td key=${q} class="right"><${Age} s=${tube.latency[key][q]} /></td>`)}<td class="right">${count(tube.latency[key].count)}</td></tr>`)}</tbody>
      </table></section>
      <section><h2>Connections</h2>
        <p class=${!tube.watching && tube.jobs.ready ? "warn-text" : ""}>${tube.watching ? html`<a href=${`/connections?tube=${encodeURIComponent(name)}`}>${counted(tube.watching, "connection watches", "connections watch")}</a> it, ${tube.waiting ? count(tube.waiting) : "none"} of them ${tube.waiting < 2 ? "waits" : "wait"} for a job.` : "No connection watches it."}</p>
        <p>${tube.using ? html`${counted(tube.using, "connection uses", "connections use")} it.` : "No connection uses it."}</p>
        <${Numbers} label="watch" numbers=${tube.watchers} /><${Numbers} label="use" numbers=${tube.users} />
      </section>
    </div>
    <${Done} tube=${name} />
  </article>`;
}

/** The jobs that are done, where the policy of the tube keeps them. */
function Done({ tube }) {
  const { data } = usePoll(`done ${tube}`, (signal) => get("/done", { tube, limit: 50 }, signal), 3000);
  if (!data?.total) return null;
  return html`<section class="part"><h2>Done</h2>
    <p class="quiet">The last ${count(data.done.length)} of ${counted(data.total, "job")} that ${data.total < 2 ? "stays" : "stay"} visible.</p>
    <table class="plain">
      <thead><tr><th scope="col">job</th><th scope="col">done</th><th scope="col" class="right">waited</th><th scope="col" class="right">ran</th><th scope="col" class="right">tries</th><th scope="col">body</th></tr></thead>
      <tbody>${data.done.map((job) => html`<tr key=${job.id}><th scope="row">${job.id}</th><td><${Moment} at=${job.ended} /></td><td class="right"><${Age} s=${job.waited_s} /></td><td class="right"><${Age} s=${job.ran_s} /></td><td class="right">${count(job.reserves)}</td><td class="excerpt">${job.body.encoding === "text" ? html`<${Plain} text=${job.body.data.slice(0, 80)} />` : "bytes"}</td></tr>`)}</tbody>
    </table>
  </section>`;
}

function StateBlock({ tube, state }) {
  const next = tube.next[state];
  const n = tube.jobs[state];
  return html`<div class="block">
    <${State} state=${state} />
    <p class="big"><${Num} n=${n} href=${jobsHref(filterOf(tube.name, state))} of=${`${state} jobs`} /></p>
    <p class="quiet">${n ? html`oldest <${Age} s=${tube.ages[state]} />` : "none"}${state === "ready" && tube.jobs.urgent ? html`, ${count(tube.jobs.urgent)} <${Term} word="urgent" />` : ""}</p>
    ${next && html`<p class="next">next <a href=${jobHref(next.id)}>${next.id}</a> <span class="excerpt">${next.body.encoding === "text" ? html`<${Plain} text=${next.body.data.slice(0, 80)} />` : "bytes"}</span></p>`}
  </div>`;
}

function Numbers({ label, numbers }) {
  if (!numbers?.length) return null;
  return html`<p class="numbers"><span class="quiet">${label}</span> ${numbers.slice(0, 30).map((number) => html`<a key=${number} href=${connectionHref(number)}>${number}</a> `)}${numbers.length > 30 ? "…" : ""}</p>`;
}

function Gone({ name, reload }) {
  return html`<${Empty} title=${`There is no tube ${name}.`}>
    <p>A tube is there while it holds a job, or while a connection uses or watches it.</p>
    <p class="buttons-line">${session.mayChange && html`<button type="button" class="primary" onClick=${() => putJob({ tube: name }, reload)}>Put a job into it…</button>`}<a class="button" href="/tubes">All tubes</a></p>
  </${Empty}><${Done} tube=${name} />`;
}
