// The audit: changes, their authors, times, origins and counts.
import { get, Problem } from "../api.js";
import { attempt } from "../actions.js";
import { html, useEffect, useRef, useState } from "../dom.js";
import { count, counted, visible } from "../format.js";
import { useEvent, useLive } from "../live.js";
import { download, Empty, Moment, Search, useTitle, Stale } from "../parts.js";
import { jobHref, jobsHref, tubeHref, useQuery } from "../route.js";
import { Table } from "../table.js";

const PAGE = 100;
const EXPORT_PAGE = 1000;

const inWords = (entry) => [entry.action, entry.job && `job ${entry.job}`, entry.filter, entry.tube, entry.detail].filter(Boolean).join(" ");

const where = (entry) => [
  entry.job ? html` <a href=${jobHref(entry.job)}>job ${entry.job}</a>` : "",
  entry.filter ? html` <a href=${jobsHref(entry.filter)}><code>${visible(entry.filter)}</code></a>` : "",
  entry.tube ? html` <a href=${tubeHref(entry.tube)}>${entry.tube}</a>` : "",
];

/** A change in one line: "kick job 5 mail", "bulk delete tube:mail state:buried, 1,204". */
export function did(entry) {
  const many = entry.count > 1 && !entry.job ? ` ${counted(entry.count, "job")}` : "";
  return html`${entry.action}${where(entry)}${entry.detail ? ` ${visible(entry.detail)}` : ""}<span class="quiet">${many}</span>`;
}

export function Audit() {
  useTitle("Audit");
  const [query, setQuery] = useQuery({ match: "" });
  const [view, setView] = useState({ key: null, entries: [], more: false, file: null, problem: null, at: 0 });
  const asked = useRef(0); // the number of the latest request; answers to earlier ones are dropped
  const busy = useRef(false);
  const { returned } = useLive();
  const { match } = query;

  const load = async (before) => {
    if (busy.current && before) return;
    busy.current = true;
    const mine = (asked.current += 1);
    try {
      const page = await get("/audit", { match, before, limit: PAGE });
      if (mine !== asked.current) return;
      setView((old) => ({
        key: match,
        entries: before ? [...old.entries, ...page.entries] : page.entries,
        more: page.entries.length === PAGE,
        file: page.file,
        problem: null,
        at: Date.now(),
      }));
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (mine === asked.current) setView((old) => ({ ...old, problem }));
    } finally {
      if (mine === asked.current) busy.current = false;
    }
  };
  useEffect(() => {
    load();
  }, [match, returned]);
  const held = useRef(false);
  useEvent("audit", () => {
    if (!held.current && scrollY < 200) load();
  });

  const columns = [
    { id: "at", title: "When", width: "w-time", cell: (entry) => html`<${Moment} at=${entry.at} />` },
    { id: "who", title: "Who", width: "w-use", cell: (entry) => html`<span title=${`${entry.who}: ${entry.role}, by ${entry.via}`}>${entry.who}</span>` },
    { id: "what", title: "What", width: "w-name", cell: (entry) => html`<span title=${inWords(entry)}>${entry.action}${where(entry)}${entry.detail ? html` <span class="quiet">${entry.detail}</span>` : ""}</span>` },
    { id: "count", title: "how many", num: true, width: "w-short", hide: "s", cell: (entry) => count(entry.count) },
    { id: "from", title: "From", width: "w-tube", hide: "n", cell: (entry) => html`<span title=${entry.from}>${entry.from} <span class="quiet">${entry.via}</span></span>` },
  ];
  const save = () => attempt("Saving", async () => {
    const lines = [];
    let before;
    for (;;) {
      const page = await get("/audit", { match, before, limit: EXPORT_PAGE });
      lines.push(...page.entries.map((entry) => JSON.stringify(entry)));
      if (page.entries.length < EXPORT_PAGE) break;
      before = page.entries.at(-1).number;
    }
    download("audit.jsonl", lines.map((line) => `${line}\n`).join(""), "application/x-ndjson");
  });
  return html`<div>
    <div class="page-head">
      <h1>Audit</h1>
      <span class="quiet">${view.key === null ? "" : view.file ? html`changes that people made, in <code>${view.file}</code>` : "the latest 1,000 changes that people made, in memory; --audit FILE keeps all"}</span>
      <div class="push"><button type="button" disabled=${!view.entries.length} onClick=${save}>Save as JSON lines</button></div>
    </div>
    <div class="filters"><${Search} value=${match} onChange=${(next) => setQuery({ match: next })} label="Words in who, what, where" placeholder="Words in who, what, where   /" /></div>
    <${Stale} problem=${view.key !== null && view.problem} at=${view.at} reload=${() => load()} />
    <${Table}
      label="Audit" columns=${columns} count=${view.entries.length} rowAt=${(index) => view.entries[index]} keyOf=${(entry) => entry.number}
      onRange=${(first, last) => last >= view.entries.length && view.more && load(view.entries.at(-1).number)}
      onHold=${(now) => { held.current = now; }}
      problem=${view.problem} reload=${() => load()} loading=${view.key === null}
      empty=${html`<${Empty} title=${match ? "Nothing matches." : "There are no changes yet."} />`}
    />
  </div>`;
}
