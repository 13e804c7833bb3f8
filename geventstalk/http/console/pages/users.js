// Users with rights: what each may do, what each takes, and what was refused.
import { get } from "../api.js";
import { html } from "../dom.js";
import { bytes, count, counted } from "../format.js";
import { usePoll } from "../live.js";
import { Empty, Num, Stale, useTitle } from "../parts.js";
import { connectionsHref, useQuery } from "../route.js";
import { Table } from "../table.js";

const MOST = 1000;
const ALL = ["put", "work", "look", "manage"];

const LIMITS = {
  connections: (most) => counted(most, "connection"),
  puts_per_second: (most, all) => `${counted(most, "put")} a second${all.puts_burst === most ? "" : `, ${count(all.puts_burst)} at once`}`,
  watched: (most) => `${counted(most, "watched tube")} a connection`,
  reserved: (most) => `${counted(most, "reserved job")} a connection`,
  job_bytes: (most) => `jobs of ${bytes(most)}`,
  jobs: (most, all, one) => `${counted(most, "job")}, and has ${count(one.jobs)}`,
  bytes: (most, all, one) => `${bytes(most)} in all jobs, and has ${bytes(one.bytes)}`,
  ttr: (most) => `a ttr of ${counted(most, "second")}`,
  delay: (most) => `a delay of ${counted(most, "second")}`,
};

const inWords = (words) => (ALL.every((word) => words.includes(word)) ? ["all", ...words.filter((word) => !ALL.includes(word))] : words).join(", ");
const rightsOf = (one) => Object.entries(one.rights).map(([pattern, words]) => `${pattern}: ${inWords(words)}`);
const limitsOf = (one) => Object.entries(one.limits).filter(([key]) => LIMITS[key]).map(([key, most]) => LIMITS[key](most, one.limits, one));
const shownBy = (one) => Object.entries(one.shown_by).map(([key, value]) => (key === "token" ? "token" : `${key.replace("_", " ")} ${[value].flat().join(", ")}`));

export function Users() {
  useTitle("Users");
  const [query, setQuery] = useQuery({ sort: "name", desc: "" });
  const descending = query.desc === "1";
  const { data, problem, at, loading, reload } = usePoll(JSON.stringify(query), (signal) => get("/users", { sort: query.sort, descending, limit: MOST }, signal), 2000);
  const rows = data?.users ?? [];
  const listed = (texts, none) => (texts.length ? html`<span title=${texts.join("; ")}>${texts.join("; ")}</span>` : html`<span class="none">${none}</span>`);
  const columns = [
    { id: "name", title: "User", sort: "name", width: "w-use", cell: (one) => html`<span title=${one.name}>${one.name}</span>` },
    { id: "rights", title: "May", cell: (one) => listed(rightsOf(one), "nothing") },
    { id: "limits", title: "At most", hide: "m", cell: (one) => listed(limitsOf(one), "–") },
    { id: "by", title: "Shown by", hide: "l", cell: (one) => listed(shownBy(one), "–") },
    { id: "connections", title: "open", sort: "connections", first: "descending", num: true, width: "w-few", cell: (one) => html`<${Num} n=${one.connections} href=${connectionsHref(one.name)} of="connections" />` },
    { id: "reserved", title: "holds", word: "holds", num: true, width: "w-few", hide: "s", cell: (one) => count(one.reserved) },
    { id: "commands", title: "commands", sort: "commands", first: "descending", num: true, width: "w-short", hide: "s", cell: (one) => html`<${Num} n=${one.commands} />` },
    { id: "puts", title: "puts", sort: "puts", first: "descending", num: true, width: "w-num", hide: "m", cell: (one) => html`<span title=${`${count(one.delayed_puts)} of them waited for their turn`}><${Num} n=${one.puts} /></span>` },
    { id: "refused", title: "refused", sort: "refused", first: "descending", num: true, width: "w-short", cell: (one) => html`<span class=${one.refused_commands + one.refused_connections ? "warn-text" : "zero"} title=${`${counted(one.refused_commands, "command")}, ${counted(one.refused_connections, "connection")}`}>${count(one.refused_commands + one.refused_connections)}</span>` },
  ];
  return html`<div>
    <div class="page-head"><h1>Users</h1><span class="quiet" role="status">${data ? `${counted(data.total, "user")}${data.total > rows.length ? `, the first ${count(rows.length)}` : ""}; figures since the server began` : ""}</span></div>
    <${Stale} problem=${data && problem} at=${at} reload=${reload} />
    <${Table} label="Users" columns=${columns} count=${rows.length} rowAt=${(index) => rows[index]} keyOf=${(one) => one.name}
      sort=${query.sort} descending=${descending} onSort=${(sort, down) => setQuery({ sort, desc: down ? "1" : "" })}
      problem=${problem} reload=${reload} loading=${loading} empty=${html`<${Empty} title="There are no users." />`} />
  </div>`;
}
