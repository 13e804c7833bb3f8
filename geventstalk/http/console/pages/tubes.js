// All tubes. The server sorts and filters; only the rows in view are fetched, so 10,000 tubes cost what 50 do.
import { get, Problem, session } from "../api.js";
import { bulkTubes, pauseTubes, putJob } from "../actions.js";
import { MenuButton, work } from "../dialog.js";
import { html, useCallback, useEffect, useRef, useState } from "../dom.js";
import { count, counted, short } from "../format.js";
import { isRunning, live, useLive, usePoll } from "../live.js";
import { Chips, Empty, Search, Stale, STATES, Term, useTitle } from "../parts.js";
import { navigate, tubeHref, useQuery } from "../route.js";
import { merged, Table } from "../table.js";
import { tubeColumns, withLive } from "../tubelist.js";
import { FirstJob } from "./overview.js";

const ONLY = [
  ["ready", "ready"], ["reserved", "reserved"], ["delayed", "delayed"], ["buried", "buried"], ["urgent", "urgent"],
  ["paused", "paused"], ["no-consumer", "no consumer"], ["growing", "growing"],
];
const PAGE = 100;
const EVERY_MS = 3000;
const GROUPED_FROM = 50; // with this many tubes, groups are shown
const GROUPS_SHOWN = 12;
const GROUPS_MS = 10_000;
const keyOf = (tube) => tube.name;

/** The rows of a table of tubes; those in view are fetched again every 3 s. */
function useTubes(ask) {
  const [view, setView] = useState({ rows: [], total: null, problem: null, at: 0 });
  const state = useRef({ range: [0, 40], held: false, key: "", control: null, timer: null }).current;
  const key = JSON.stringify(ask);

  const load = useCallback(async (byItself = false) => {
    clearTimeout(state.timer);
    state.control?.abort();
    const control = (state.control = new AbortController());
    const offset = Math.max(0, state.range[0] - 20);
    const limit = Math.min(1000, Math.max(PAGE, state.range[1] + 40 - offset));
    const fresh = state.key !== key;
    try {
      const page = await get("/tubes", { ...ask, spark: true, offset, limit }, control.signal);
      if (control.signal.aborted) return;
      state.key = key;
      setView((old) => {
        const held = state.held && !fresh && byItself;
        const rows = merged(fresh ? [] : old.rows, page.tubes, offset, keyOf, held);
        if (!held) rows.length = page.total;
        return { rows, total: page.total, problem: null, at: Date.now() };
      });
    } catch (problem) {
      if (control.signal.aborted) return;
      if (!(problem instanceof Problem)) throw problem;
      setView((old) => ({ ...old, problem }));
    }
    state.timer = setTimeout(tick, EVERY_MS);
  }, [key]);
  const tick = () => {
    clearTimeout(state.timer);
    if (isRunning()) state.load(true);
    else state.timer = setTimeout(tick, 500);
  };
  state.load = load;
  useEffect(() => {
    load();
  }, [load]);
  useEffect(
    () => () => {
      clearTimeout(state.timer);
      state.control?.abort();
    },
    [],
  );

  const onRange = (first, last) => {
    state.range = [first, last];
    for (let at = first; at < Math.min(last, view.rows.length); at += 1) {
      if (view.rows[at] === undefined) {
        clearTimeout(state.timer);
        state.timer = setTimeout(() => state.load(true), 60);
        return;
      }
    }
  };
  const onHold = (held) => {
    state.held = held;
  };
  return { ...view, load, onRange, onHold, range: state.range };
}

export function Tubes() {
  useTitle("Tubes");
  const [query, setQuery] = useQuery({ match: "", prefix: "", only: "", sort: "trouble", desc: "" });
  const only = query.only ? query.only.split(",") : [];
  const descending = query.desc === "1";
  const ask = { match: query.match, prefix: query.prefix, only, sort: query.sort, descending };
  const { rows, total, problem, at, load, onRange, onHold, range } = useTubes(ask);
  const [held, setHeld] = useState(false);
  const seen = rows.slice(range[0], range[1]).filter(Boolean).map(keyOf);
  const { server } = useLive(seen);
  const filtered = query.match !== "" || query.prefix !== "" || only.length > 0;
  const all = server?.tubes;

  return html`<div class="tubes">
    <div class="page-head">
      <h1>Tubes</h1>
      <span class="quiet" role="status">${total === null ? "" : filtered && all ? `${counted(total, "tube")} of ${counted(all, "tube")}`.replace(/ tubes? of/, " of") : counted(total, "tube")}</span>
      ${held && html`<span class="tag"><${Term} word="order held" /></span>`}
      <div class="push">
        ${session.mayChange && html`
          <button type="button" onClick=${() => putJob({}, () => load())}>Put a job…</button>
          <${MenuButton} label="Actions of all these tubes" items=${() => manyItems(ask, total, filtered, () => load())}>${filtered ? "These" : "All"} ${total === null ? "tubes" : counted(total, "tube")} ▾</${MenuButton}>`}
      </div>
    </div>
    <div class="filters">
      <${Search} value=${query.match} onChange=${(match) => setQuery({ match })} label="Words in the name" placeholder="Words in the name   /" />
      <${Chips} label="Only tubes that are" options=${ONLY} chosen=${only} onChange=${(next) => setQuery({ only: next.join(",") })} />
      ${query.sort !== "trouble" && html`<button type="button" class="link" onClick=${() => setQuery({ sort: "trouble", desc: "" })}>The worst first</button>`}
    </div>
    ${query.prefix
      ? html`<p class="groups"><span class="tag">begin with ${query.prefix}</span> <button type="button" class="link" onClick=${() => setQuery({ prefix: "" })}>Show all</button></p>`
      : all >= GROUPED_FROM && html`<${Groups} onChoose=${(prefix) => setQuery({ prefix }, { replace: false })} />`}
    <${Stale} problem=${total !== null && problem} at=${at} reload=${() => load()} />
    <${Table}
      label="Tubes" columns=${tubeColumns(() => load())} count=${rows.length} rowAt=${(index) => withLive(rows[index], live)} keyOf=${keyOf}
      sort=${query.sort} descending=${descending} onSort=${(sort, down) => setQuery({ sort, desc: down ? "1" : "" })}
      onRange=${onRange} onHold=${(now) => { onHold(now); setHeld(now); }} onOpen=${(tube) => navigate(tubeHref(tube.name))}
      problem=${problem} reload=${() => load()} loading=${total === null}
      empty=${filtered
        ? html`<${Empty} title="No tube matches."><p><button type="button" onClick=${() => setQuery({ match: "", prefix: "", only: "" })}>Show all tubes</button></p></${Empty}>`
        : html`<${FirstJob} server=${server} />`}
    />
  </div>`;
}

/** Tubes whose names begin alike, the largest groups first, each with its sums. */
function Groups({ onChoose }) {
  const { data } = usePoll("groups", (signal) => get("/tube-groups", {}, signal), GROUPS_MS);
  const [all, setAll] = useState(false);
  const groups = data?.groups ?? [];
  if (!groups.length) return null;
  const sums = (jobs) => STATES.map((state) => `${count(jobs[state])} ${state}`).join(", ");
  return html`<div class="groups chips" role="group" aria-label="Tubes by the beginning of their names">
    ${groups.slice(0, all ? groups.length : GROUPS_SHOWN).map(({ prefix, tubes, jobs }) => html`<button key=${prefix} type="button" class="chip" title=${`${counted(tubes, "tube")}: ${sums(jobs)}`} onClick=${() => onChoose(prefix)}>
      ${prefix}* <b>${count(tubes)}</b>${jobs.buried ? html` <span class="warn-text">${short(jobs.buried)} buried</span>` : ""}</button>`)}
    ${groups.length > GROUPS_SHOWN && html`<button type="button" class="link" onClick=${() => setAll(!all)}>${all ? "Fewer groups" : `${count(groups.length - GROUPS_SHOWN)} more groups`}</button>`}
  </div>`;
}

/** All tubes that match, page by page. */
async function everyTube(ask) {
  const tubes = [];
  for (;;) {
    const page = await get("/tubes", { ...ask, sort: "name", descending: false, offset: tubes.length, limit: 1000 });
    tubes.push(...page.tubes);
    if (!page.tubes.length || tubes.length >= page.total) return tubes;
  }
}

function manyItems(ask, total, filtered, after) {
  const collect = async (run) => run(await work({ title: "Counting tubes", run: () => everyTube(ask) }));
  const word = filtered ? "these" : "all";
  return [
    { text: `Pause or resume ${word}…`, disabled: !total, run: () => collect((tubes) => pauseTubes(tubes.map(keyOf), after)) },
    { text: `Kick the buried jobs of ${word}…`, disabled: !total, run: () => collect((tubes) => bulkTubes(tubes, { action: "kick", state: "buried" }, after)) },
    null,
    ...["ready", "delayed", "buried"].map((state) => ({
      text: `Delete the ${state} jobs of ${word}…`,
      danger: true,
      disabled: !total,
      run: () => collect((tubes) => bulkTubes(tubes, { action: "delete", state }, after)),
    })),
  ];
}
