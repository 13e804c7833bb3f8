// Policies and schedules: what holds for puts into tubes, and the jobs that the server puts itself.
import { get, path, put, remove, session } from "../api.js";
import { attempt } from "../actions.js";
import { ask, MenuButton, say } from "../dialog.js";
import { html } from "../dom.js";
import { bytes, count, counted } from "../format.js";
import { usePoll } from "../live.js";
import { Empty, Moment, Num, Stale, useTitle } from "../parts.js";
import { tubeHref } from "../route.js";
import { Table } from "../table.js";

const U32_MAX = 4_294_967_295;
const EXAMPLES = {
  policies: '{"tries": 5, "dead_letter": "mail.dead", "max_jobs": 100000}',
  schedules: '{"cron": "0 3 * * *", "zone": "UTC", "tube": "reports", "body": "nightly"}',
};
const NOUNS = { policies: ["policy", "Tubes, as a pattern"], schedules: ["schedule", "Name"] };

const bounds = (name, { min, max }, least) =>
  [min > least && `${name} from ${count(min)}`, max < U32_MAX && `${name} up to ${count(max)}`].filter(Boolean);

const termsOf = (one) => [
  one.pause && "no job is handed out",
  ...one.tags,
  ...bounds("priority", one.priority, 0), ...bounds("delay", one.delay, 0), ...bounds("ttr", one.ttr, 1),
  one.max_jobs !== null && `at most ${counted(one.max_jobs, "job")}`,
  one.max_bytes !== null && `at most ${bytes(one.max_bytes)} in all`,
  one.max_job_bytes !== null && `bodies up to ${bytes(one.max_job_bytes)}`,
  one.max_rate !== null && `${counted(one.max_rate, "put")} a second`,
  one.keep.jobs > 0 && `${counted(one.keep.jobs, "done job stays", "done jobs stay")} visible`,
  one.keep.seconds > 0 && `done jobs stay visible for ${counted(one.keep.seconds, "second")}`,
  one.events && "jobs keep their events",
].filter(Boolean);

/** Returns the entry that the text says, or why it says none. */
function parsed(text) {
  try {
    const entry = JSON.parse(text);
    return entry !== null && typeof entry === "object" && !Array.isArray(entry) ? { entry } : { fault: "The terms are an object, as in the example." };
  } catch {
    return { fault: "The terms are not JSON." };
  }
}

/** Asks for an entry, and makes it or replaces it. */
async function change(kind, name, entry, after) {
  const [noun, label] = NOUNS[kind];
  const said = await ask({
    title: name ? `Change the ${noun} ${name}` : `Set a ${noun}`,
    text: "The journal keeps it: it outlives a restart, and stands in front of those of the file.",
    wide: true,
    fields: [
      ...(name ? [] : [{ name: "name", label, autofocus: true }]),
      { name: "terms", label: "Terms, as JSON", kind: "area", value: JSON.stringify(entry ?? {}, null, 1), hint: `For example ${EXAMPLES[kind]}`, autofocus: Boolean(name) },
    ],
    check: (values) => (name || values.name ? parsed(values.terms).fault ?? null : "A name is missing."),
    button: `Set the ${noun}`,
  });
  if (!said) return;
  const of = name || said.name;
  if (await attempt(`The ${noun}`, () => put(path`/${kind}/${of}`, parsed(said.terms).entry))) say(`The ${noun} ${of} is in use.`);
  after();
}

async function end(kind, name, after) {
  const [noun] = NOUNS[kind];
  const said = await ask({ title: `Remove the ${noun} ${name}?`, text: "What the file of settings says counts again.", danger: true, button: `Remove the ${noun}` });
  if (!said) return;
  if (await attempt("The removal", () => remove(path`/${kind}/${name}`))) say(`The ${noun} ${name} is removed.`);
  after();
}

function columnsOf(kind, nameOf, reload) {
  const menu = (one) => [
    { text: one.at_run_time ? "Change…" : "Replace…", run: () => change(kind, nameOf(one), one.entry, reload) },
    one.at_run_time && { text: "Remove…", danger: true, run: () => end(kind, nameOf(one), reload) },
  ];
  return [
    { id: "from", title: "Set", width: "w-use", hide: "m", cell: (one) => (one.at_run_time ? "at run time" : "in the file") },
    session.mayOperate && { id: "menu", title: "", label: "Actions", width: "w-menu", cell: (one) => html`<${MenuButton} small quiet label=${`Actions for ${nameOf(one)}`} items=${() => menu(one)}>⋯</${MenuButton}>` },
  ].filter(Boolean);
}

function Part({ kind, title, data, list, nameOf, columns, empty }) {
  const { problem, at, loading, reload } = data;
  const rows = data.data?.[kind] ?? [];
  return html`<section class="part">
    <div class="page-head"><h2>${title}</h2><div class="push">${session.mayOperate && html`<button type="button" onClick=${() => change(kind, "", null, reload)}>Set a ${NOUNS[kind][0]}…</button>`}</div></div>
    <${Stale} problem=${data.data && problem} at=${at} reload=${reload} />
    <${Table} label=${title} columns=${[...columns, ...columnsOf(kind, nameOf, reload)]} count=${rows.length} rowAt=${(index) => rows[index]} keyOf=${nameOf}
      problem=${problem} reload=${reload} loading=${loading} empty=${html`<${Empty} title=${empty} />`} />
  </section>`;
}

export function Policies() {
  useTitle("Policies");
  const policies = usePoll("policies", (signal) => get("/policies", {}, signal), 3000);
  const schedules = usePoll("schedules", (signal) => get("/schedules", {}, signal), 3000);
  const listed = (texts) => html`<span title=${texts.join("; ")}>${texts.join("; ") || "–"}</span>`;
  return html`<div>
    <div class="page-head"><h1>Policies</h1><span class="quiet">The first pattern that fits a tube counts.</span></div>
    <${Part} kind="policies" title="Of tubes" data=${policies} nameOf=${(one) => one.tubes} empty="There is no policy." columns=${[
      { id: "tubes", title: "Tubes", width: "w-use", cell: (one) => html`<span title=${one.tubes}>${one.tubes}</span>` },
      { id: "terms", title: "Terms", cell: (one) => listed(termsOf(one)) },
      { id: "refused", title: "refused", num: true, width: "w-short", cell: (one) => html`<span class=${one.refused_puts ? "warn-text" : "zero"} title="puts above a limit">${count(one.refused_puts)}</span>` },
      { id: "delayed", title: "waited", num: true, width: "w-short", hide: "m", cell: (one) => html`<${Num} n=${one.delayed_puts} />` },
    ]} />
    <${Part} kind="schedules" title="Schedules" data=${schedules} nameOf=${(one) => one.name} empty="There is no schedule." columns=${[
      { id: "name", title: "Name", width: "w-use", cell: (one) => html`<span title=${one.name}>${one.name}</span>` },
      { id: "cron", title: "When", cell: (one) => html`<span title=${one.zone}><code>${one.cron}</code> ${one.zone}</span>` },
      { id: "tube", title: "Tube", hide: "s", cell: (one) => html`<a href=${tubeHref(one.tube)}>${one.tube}</a>` },
      { id: "next", title: "Next", hide: "m", cell: (one) => html`<${Moment} at=${one.next} />` },
      { id: "last", title: "Last", hide: "m", cell: (one) => (one.last ? html`<${Moment} at=${one.last.tick} /> ${one.last.outcome}` : "–") },
    ]} />
  </div>`;
}
