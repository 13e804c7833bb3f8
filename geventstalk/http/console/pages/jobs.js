// Jobs that match a filter. The filter is in the address. Rows load page by page while scrolling, in order of their ids.
import { address, get, Problem, session } from "../api.js";
import { asks, bulk, fits, putJob, some } from "../actions.js";
import { MenuButton } from "../dialog.js";
import { html, useEffect, useRef, useState } from "../dom.js";
import { stateless } from "../filter.js";
import { FilterLine } from "../filterline.js";
import { bytes, clock, count, counted } from "../format.js";
import { isRunning, live, useLive } from "../live.js";
import { Age, Chips, Empty, Plain, Shape, useTitle, Stale, State, STATES, Term } from "../parts.js";
import { jobHref, navigate, tubeHref, useQuery } from "../route.js";
import { merged, Table } from "../table.js";
import { FirstJob } from "./overview.js";

const PAGE = 50;
const AGAIN_MS = 5000;
const QUICK_MS = 150; // a search that took no longer is repeated by itself
const EMPTY_PAGES_MAX = 40; // of a long search without a hit, before it stops
const keyOf = (job) => job.id;

/** The first characters of a body, on one line. */
export function excerpt(body) {
  if (body.encoding === "text") return html`<span class="excerpt"><${Plain} text=${body.data.replace(/\s+/g, " ")} /></span>`;
  return html`<span class="excerpt quiet">${bytesOf(body.data, 24)}</span>`;
}

function bytesOf(base64, most) {
  const raw = atob(base64.slice(0, Math.ceil(most / 3) * 4));
  return Array.from(raw.slice(0, most), (one) => one.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
}

/** The jobs of a filter: pages of a cursor, the first one loaded again while that is quick. */
function useJobs(filter, descending) {
  const key = `${descending} ${filter}`;
  const blank = { key: null, jobs: [], next: null, searched: 0, problem: null, at: 0, busy: true };
  const [view, setView] = useState(blank);
  const state = useRef({ control: null, timer: null, held: false, quick: true, pages: 0 }).current;
  const latest = useRef(view);
  latest.current = view;

  const load = async ({ more = false, byItself = false } = {}) => {
    clearTimeout(state.timer);
    state.control?.abort();
    const control = (state.control = new AbortController());
    const old = latest.current.key === key ? latest.current : blank;
    let cursor = more ? old.next : null;
    let searched = more ? old.searched : 0;
    let jobs = more ? old.jobs : [];
    setView((now) => ({ ...now, busy: true }));
    const begun = performance.now();
    try {
      for (let pages = 0; ; pages += 1) {
        const page = await get("/jobs", { filter, descending, cursor, limit: PAGE, body: 200 }, control.signal);
        if (control.signal.aborted) return;
        jobs = [...jobs, ...page.jobs];
        cursor = page.next;
        searched += page.searched;
        const enough = cursor === null || page.jobs.length > 0 || pages >= EMPTY_PAGES_MAX;
        if (byItself && state.held && old.jobs.length) jobs = merged(old.jobs, jobs, 0, keyOf, true);
        const shown = { key, jobs, next: cursor, searched, problem: null, at: Date.now(), busy: !enough };
        setView(shown);
        latest.current = shown;
        if (enough) break;
      }
      state.quick = performance.now() - begun < QUICK_MS;
      state.pages = more ? state.pages + 1 : 1;
    } catch (problem) {
      if (control.signal.aborted) return;
      if (!(problem instanceof Problem)) throw problem;
      setView((now) => ({ ...(now.key === key ? now : blank), key, problem, busy: false }));
    }
    plan();
  };
  const plan = () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(() => {
      if (!state.quick || state.pages > 1) return;
      if (isRunning() && scrollY < 300) state.load({ byItself: true });
      else plan();
    }, AGAIN_MS);
  };
  state.load = load;
  const { returned } = useLive();
  useEffect(() => {
    load();
    return () => {
      clearTimeout(state.timer);
      state.control?.abort();
    };
  }, [key, returned]);
  const fresh = view.key === key;
  return {
    ...(fresh ? view : blank),
    waiting: !fresh,
    reload: () => load(),
    more: () => fresh && !view.busy && view.next !== null && load({ more: true }),
    stop: () => {
      state.control?.abort();
      setView((now) => ({ ...now, busy: false }));
    },
    hold: (held) => {
      state.held = held;
    },
  };
}

function countsOf(jobs) {
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const job of jobs) counts[job.state] += 1;
  return counts;
}

export function Jobs() {
  const [query, setQuery] = useQuery({ filter: "", order: "new" });
  useTitle(query.filter ? `Jobs: ${query.filter}` : "Jobs");
  const { filter } = query;
  const descending = query.order === "new";
  const found = useJobs(filter, descending);
  const { jobs } = found;
  const isWrong = found.problem?.at !== undefined;
  const [selected, setSelected] = useState(new Map());
  const lastSelected = useRef(null);
  const [held, setHeld] = useState(false);
  const facets = stateless(filter);
  const { server } = useLive(facets.tube ? [facets.tube] : []);
  useEffect(() => setSelected(new Map()), [filter]);

  // How many jobs each state has is known without a filter, and for one tube alone; else the rows tell, once all are here.
  const whole = found.next === null && !found.waiting && !isWrong && !facets.states.length;
  const counts = facets.alone ? (facets.tube ? live.tubes.get(facets.tube)?.jobs : server?.jobs) : whole ? countsOf(jobs) : null;
  const total = counts && (facets.states.length ? facets.states : STATES).reduce((sum, state) => sum + counts[state], 0);
  const states = STATES.map((state) => [state, html`<${Shape} state=${state} />${state}${counts ? html` <b>${count(counts[state])}</b>` : ""}`]);

  // The rows have the new states of selected jobs.
  const here = new Map(jobs.map((job) => [job.id, job]));
  const chosen = [...selected.values()].map((job) => here.get(job.id) ?? job);
  const toggle = (job, index, range) => {
    setSelected((old) => {
      const next = new Map(old);
      const on = !old.has(job.id);
      const last = range ? jobs.findIndex((one) => one.id === lastSelected.current) : -1; // rows may have come since
      const from = last < 0 ? index : last;
      for (let at = Math.min(from, index); at <= Math.max(from, index); at += 1) {
        if (on) next.set(jobs[at].id, jobs[at]);
        else next.delete(jobs[at].id);
      }
      return next;
    });
    lastSelected.current = job.id;
  };
  const toggleAll = () => setSelected(selected.size >= jobs.length ? new Map() : new Map(jobs.map((job) => [job.id, job])));
  const after = () => {
    setSelected(new Map());
    found.reload();
  };

  const columns = [
    { id: "id", title: "Job", width: "w-id", sort: "id", first: "descending", cell: (job) => html`<a href=${jobHref(job.id)}>${job.id}</a>` },
    { id: "tube", title: "Tube", width: "w-tube", cell: (job) => html`<a href=${tubeHref(job.tube)} title=${job.tube}>${job.tube}</a>` },
    { id: "state", title: "State", width: "w-state", cell: (job) => html`<${State} state=${job.state} />` },
    { id: "since", title: "since", num: true, width: "w-age", hide: "l", cell: (job) => html`<${Age} s=${job.since_s} />` },
    { id: "age", title: "age", num: true, width: "w-age", cell: (job) => html`<${Age} s=${job.age_s} />` },
    { id: "pri", title: "pri", num: true, width: "w-rate", hide: "l", cell: (job) => count(job.pri) },
    { id: "size", title: "size", num: true, width: "w-rate", cell: (job) => bytes(job.size).replace(" bytes", " B").replace(" byte", " B") },
    { id: "body", title: "Body", hide: "m", cell: (job) => excerpt(job.body) },
  ];
  const status = found.waiting || isWrong
    ? ""
    : found.next === null
      ? html`<b>${counted(jobs.length, "job")}</b>`
      : html`<b>the first ${counted(jobs.length, "job")}</b>${facets.alone && total > jobs.length ? ` of ${count(total)}` : ""}`;
  return html`<div>
    <h1 class="offscreen">Jobs</h1>
    <${FilterLine} value=${filter} problem=${found.problem} onChange=${(next) => setQuery({ filter: next }, { replace: false })} />
    <${Chips} label="Only jobs that are" options=${states} chosen=${facets.states} onChange=${(chosen) => setQuery({ filter: facets.within(STATES.filter((state) => chosen.includes(state))) }, { replace: false })} />
    <div class="tool-line">
      <span class="quiet"><span role="status">${status}${!found.waiting && !isWrong && `, ${counted(found.searched, "job")} searched`}</span>${!found.waiting && found.at ? `, at ${clock(found.at / 1000)}` : ""}</span>
      ${found.busy && jobs.length === 0 && !found.waiting && html`<button type="button" class="link" onClick=${found.stop}>Stop</button>`}
      ${held && html`<span class="tag"><${Term} word="order held" /></span>`}
      <div class="push">
        ${selected.size > 0
          ? html`<span><b>${counted(selected.size, "job")}</b> selected</span>
            ${["kick", "bury", "release", "delete"].map((action) => {
              const right = chosen.filter((job) => fits(action, job));
              return html`<button key=${action} type="button" class="small ${action === "delete" ? "danger-text" : ""}" disabled=${!right.length} onClick=${() => some(chosen, action, after)}>${action[0].toUpperCase() + action.slice(1)}${asks(action, right) ? "…" : ""}</button>`;
            })}
            <${MenuButton} small label="More actions of the selected jobs" items=${() => [
              { text: "Move…", run: () => some(chosen, "move", after) },
              { text: "Change priority, delay, ttr…", run: () => some(chosen, "change", after) },
              { text: "Select none", run: () => setSelected(new Map()) },
            ]}>More ▾</${MenuButton}>`
          : html`
            <button type="button" class="small" onClick=${found.reload}>Refresh</button>
            <a class="button small" href=${address("/export", { filter })} download="jobs.jsonl" title="All jobs that match, as JSON lines with whole bodies">Export</a>
            ${session.mayChange && html`
              <button type="button" class="small" onClick=${() => putJob({}, after)}>Put a job…</button>
              <${MenuButton} small label="Actions of all jobs that match" items=${() => allItems(filter, after)}>All that match ▾</${MenuButton}>`}`}
      </div>
    </div>
    <${Stale} problem=${jobs.length > 0 && found.problem} at=${found.at} reload=${found.reload} />
    <${Table}
      label="Jobs" columns=${columns} count=${jobs.length} rowAt=${(index) => jobs[index]} keyOf=${keyOf}
      sort="id" descending=${descending} onSort=${(_, down) => setQuery({ order: down ? "new" : "old" })}
      selected=${selected} onSelect=${session.mayChange ? toggle : undefined} onSelectAll=${toggleAll}
      onRange=${(first, last) => last >= jobs.length && found.more()} onHold=${(now) => { found.hold(now); setHeld(now); }}
      onOpen=${(job) => navigate(jobHref(job.id))}
      problem=${isWrong ? null : found.problem} reload=${found.reload} loading=${found.waiting || (found.busy && !jobs.length)}
      empty=${isWrong
        ? html`<${Empty} title="The server does not understand this filter." />`
        : found.next !== null
        ? html`<${Empty} title="No job so far."><p>${counted(found.searched, "job")} searched.</p><p><button type="button" onClick=${found.more}>Search on</button></p></${Empty}>`
        : filter
          ? html`<${Empty} title="No job matches."><p><button type="button" onClick=${() => setQuery({ filter: "" })}>Show all jobs</button></p></${Empty}>`
          : html`<${FirstJob} server=${server} />`}
    />
    ${jobs.length > 0 && found.next !== null && html`<p class="more-line">${found.busy ? "Searching…" : html`<button type="button" onClick=${found.more}>More jobs</button>`}</p>`}
  </div>`;
}

function allItems(filter, after) {
  const item = (action, text, danger) => ({ text, danger, run: () => bulk({ filter, action }, after) });
  return [
    item("kick", "Kick all…"),
    item("bury", "Bury all…"),
    item("release", "Release all…"),
    item("move", "Move all…"),
    item("change", "Change priority, delay, ttr of all…"),
    null,
    item("delete", "Delete all…", true),
  ];
}
