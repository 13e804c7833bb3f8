// Clients of the beanstalk port: the tubes they use and watch, the jobs they hold, and how long they wait.
import { get, path, Problem, session } from "../api.js";
import { closeConnection } from "../actions.js";
import { html, useRef, useState } from "../dom.js";
import { bytes, count, counted, visible } from "../format.js";
import { usePoll } from "../live.js";
import { Age, Empty, Moment, Num, Plain, Stale, Term, useTitle } from "../parts.js";
import { jobsHref, tubeHref, useQuery } from "../route.js";
import { merged, Table } from "../table.js";

const keyOf = (one) => one.number;
const PAGE = 200;

/** A page that holds one connection, or none when it is gone. */
async function only(number, signal) {
  try {
    return { connections: [await get(path`/connections/${number}`, {}, signal)], total: 1 };
  } catch (problem) {
    if (problem instanceof Problem && (problem.status === 404 || problem.status === 400)) return { connections: [], total: 0 };
    throw problem;
  }
}

export function Connections() {
  useTitle("Connections");
  const [query, setQuery] = useQuery({ number: "", tube: "", user: "", sort: "number", desc: "" });
  const [held, setHeld] = useState(false);
  const state = useRef({ rows: [], key: "", range: [0, 40] }).current;
  state.held = held;
  const descending = query.desc === "1";
  const chosen = query.number ? `number ${query.number}` : [query.tube && `use or watch ${query.tube}`, query.user && `of ${query.user}`].filter(Boolean).join(", ");
  const key = JSON.stringify(query);
  const { data, problem, at, loading, reload } = usePoll(
    key,
    async (signal) => {
      const offset = Math.max(0, state.range[0] - 20);
      const limit = Math.max(PAGE, state.range[1] - offset + 20);
      const page = query.number ? await only(query.number, signal) : await get("/connections", { tube: query.tube, user: query.user, sort: query.sort, descending, offset, limit: Math.min(1000, limit) }, signal);
      const fresh = state.key !== key;
      const hold = state.held && !fresh && !state.changed;
      state.changed = false;
      state.rows = merged(fresh ? [] : state.rows, page.connections, offset, keyOf, hold);
      if (!hold) state.rows.length = page.total;
      state.key = key;
      return page;
    },
    2000,
  );
  const rows = data || problem ? state.rows : [];
  const onRange = (first, last) => {
    state.range = [first, last];
    for (let index = first; index < Math.min(last, rows.length); index += 1) if (rows[index] === undefined) return reload();
    return null;
  };
  const columns = [
    { id: "number", title: "Number", sort: "number", num: true, width: "w-short", hide: session.users ? "n" : "m", cell: (one) => one.number },
    { id: "address", title: "Address", sort: "address", width: "w-address", cell: (one) => html`<span title=${visible(`${one.address}, at ${one.listener}`)}><${Plain} text=${one.address} /></span>` },
    session.users && { id: "user", title: "User", width: "w-use", hide: "s", cell: (one) => (one.user ? html`<span title=${one.user}>${one.user}</span>` : html`<span class="none">–</span>`) },
    { id: "role", title: "Is", width: "w-short", hide: session.users ? "n" : "m", cell: (one) => [one.producer && "producer", one.worker && "worker"].filter(Boolean).join(", ") || html`<span class="none">–</span>` },
    { id: "uses", title: "Uses", width: "w-use", hide: "l", cell: (one) => html`<a href=${tubeHref(one.uses)} title=${one.uses}>${one.uses}</a>` },
    { id: "watches", title: "Watches", hide: "m", cell: (one) => html`<span title=${one.watches.join(", ")}>${one.watches.map((name, index) => html`${index ? ", " : ""}<a href=${tubeHref(name)}>${name}</a>`)}${one.watching > one.watches.length ? `, and ${count(one.watching - one.watches.length)} more` : ""}</span>` },
    { id: "reserved", title: "holds", word: "holds", sort: "reserved", first: "descending", num: true, width: "w-few", cell: (one) => html`<${Num} n=${one.reserved} href=${jobsHref(`holder:${one.number}`)} of="jobs that it holds" />` },
    { id: "waiting", title: "waits", word: "waits", sort: "waiting", first: "descending", num: true, width: "w-short", cell: (one) => html`<${Age} s=${one.waiting_s} />` },
    { id: "idle", title: "silent", word: "silent", num: true, width: "w-short", hide: "l", cell: (one) => html`<${Age} s=${one.idle_s} />` },
    { id: "connected", title: "Connected", sort: "connected", width: "w-moment", hide: "l", cell: (one) => html`<${Moment} at=${one.connected} />` },
    {
      id: "stuck", title: "Held up", word: "held up", width: "w-short", hide: "l",
      cell: (one) => [one.held_up && "journal", one.output_bytes > 0 && `${bytes(one.output_bytes)} not taken`, one.input_bytes > 0 && `${bytes(one.input_bytes)} to do`].filter(Boolean).map((text) => html`<span class="warn-text" title=${text}>${text}</span> `),
    },
    session.mayOperate && { id: "menu", title: "", label: "Close", width: "w-close", cell: (one) => html`<button type="button" class="small quiet-button" aria-label=${`Close connection ${one.number}`} onClick=${() => closeConnection(one, () => { state.changed = true; reload(); })}>Close…</button>` },
  ].filter(Boolean);
  return html`<div>
    <div class="page-head">
      <h1>Connections</h1><span class="quiet" role="status">${data ? counted(data.total, "connection") : ""}</span>
      ${chosen && html`<span class="tag" title=${chosen}>${chosen}</span><button type="button" class="link" onClick=${() => setQuery({ number: "", tube: "", user: "" })}>Show all</button>`}
      ${held && html`<span class="tag"><${Term} word="order held" /></span>`}
    </div>
    <${Stale} problem=${data && problem} at=${at} reload=${reload} />
    <${Table}
      label="Connections" columns=${columns} count=${rows.length} rowAt=${(index) => rows[index]} keyOf=${keyOf}
      sort=${query.sort} descending=${descending} onSort=${(sort, down) => setQuery({ sort, desc: down ? "1" : "" })}
      onRange=${onRange} onHold=${setHeld} problem=${problem} reload=${reload} loading=${loading}
      empty=${html`<${Empty} title=${query.number ? `There is no connection ${query.number}.` : query.tube ? `No connection uses or watches ${query.tube}.` : query.user ? `${query.user} has no connections.` : "There are no connections."} />`}
    />
  </div>`;
}
