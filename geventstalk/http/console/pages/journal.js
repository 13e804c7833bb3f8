// The journal: its space, its speed, its compaction, and its segments.
import { get } from "../api.js";
import { html } from "../dom.js";
import { age, bytes, count, exactMoment, share } from "../format.js";
import { usePoll } from "../live.js";
import { Age, Empty, Facts, Fault, Line, Loading, useTitle, Stale } from "../parts.js";
import { Table } from "../table.js";

export function Journal() {
  useTitle("Journal");
  const { data, problem, at, loading, reload } = usePoll("journal", (signal) => get("/journal", {}, signal), 2000);
  if (!data && problem) return html`<${Fault} problem=${problem} reload=${reload} what="The journal cannot be shown" />`;
  if (loading) return html`<${Loading} />`;
  if (data.directory === null) {
    return html`<div><div class="page-head"><h1>Journal</h1></div><${Empty} title="There is no journal: jobs live in memory only.">
      <p>Jobs are lost when the server ends. A server that is started with a directory keeps them:</p>
      <${Line} text="geventstalk -b /var/lib/geventstalk" />
    </${Empty}></div>`;
  }
  const room = data.budget_bytes === null ? data.disk_free_bytes : Math.min(data.budget_bytes - data.bytes, data.disk_free_bytes ?? Infinity);
  const limit = data.budget_bytes ?? data.bytes + (data.disk_free_bytes ?? 0);
  const columns = [
    { id: "number", title: "Segment", width: "w-num", num: true, cell: (one) => one.number },
    { id: "state", title: "State", width: "w-state", cell: (one) => one.state },
    { id: "bytes", title: "size", num: true, width: "w-num", hide: "s", cell: (one) => bytes(one.bytes) },
    { id: "live", title: "live", num: true, width: "w-num", cell: (one) => bytes(one.live_bytes) },
    { id: "part", title: "Live part", hide: "m", cell: (one) => html`<${Bar} parts=${[["reserved", one.live_bytes]]} of=${one.bytes} label=${`${share(one.live_bytes, one.bytes)} live`} />` },
    { id: "records", title: "records", num: true, width: "w-num", cell: (one) => count(one.records) },
  ];
  return html`<article>
    <div class="page-head"><h1>Journal</h1><code class="quiet">${data.directory}</code>
      ${data.writable ? "" : html`<span class="tag warn">puts find no room</span>`}
      ${data.compacting && html`<span class="tag">compacting</span>`}
    </div>
    <${Stale} problem=${problem} at=${at} reload=${reload} />
    <section class="room-line">
      <${Bar} big parts=${[["reserved", data.live_bytes], ["dead", data.dead_bytes]]} of=${limit} label=${`${bytes(data.live_bytes)} live, ${bytes(data.dead_bytes)} dead, of ${bytes(limit)}`} />
      <p class="legend"><span class="entry"><i class="dot s-reserved" />live <b>${bytes(data.live_bytes)}</b></span><span class="entry"><i class="dot d-dead" />dead <b>${bytes(data.dead_bytes)}</b></span><span class="entry">room left <b>${bytes(room)}</b></span><span class="entry">${data.budget_bytes === null ? "no budget; the disk is the limit" : html`budget <b>${bytes(data.budget_bytes)}</b>`}</span></p>
    </section>
    <${Facts} items=${[
      ["Policy", data.policy],
      ["Last fsync", data.last_fsync ? html`<span title=${exactMoment(data.last_fsync)}>${age(Math.max(0, at / 1000 - data.last_fsync))} ago</span>` : "none yet"],
      ["Fsync p50, p95, p99", html`${age(data.fsyncs.p50)}, ${age(data.fsyncs.p95)}, ${age(data.fsyncs.p99)}`],
      ["Fsyncs", count(data.fsyncs.count)],
      ["Commits", count(data.commits.count)],
      ["Records", count(data.commits.records)],
      ["Largest commit", `${count(data.commits.records_max)} records`],
      ["Moved by compaction", count(data.moved)],
      ["Puts refused for room", count(data.refused_puts)],
      ["Replay at the start", html`<${Age} s=${data.replay_s} />`],
      ["Free on the disk", bytes(data.disk_free_bytes)],
    ]} />
    <section class="part"><h2>Segments</h2>
      <${Table} label="Segments" columns=${columns} count=${data.segments.length} rowAt=${(index) => data.segments[index]} keyOf=${(one) => one.number} empty=${html`<${Empty} title="There is no segment yet." />`} />
    </section>
    <section class="part"><h2>Backup</h2>
      <p class="quiet">This line copies the journal as it is at one moment, while the server runs. The copy can be served, checked and exported.</p>
      <${Line} text=${`geventstalk journal backup ${quoted(data.directory)} ./backup`} />
    </section>
  </article>`;
}

const quoted = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Parts of a whole as one bar. */
function Bar({ parts, of, label, big }) {
  let from = 0;
  return html`<svg class="part-bar ${big ? "big-bar" : ""}" viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label=${label}>
    <title>${label}</title><rect class="ground" width="100" height="4" />
    ${parts.map(([name, value]) => {
      const width = of ? (100 * value) / of : 0;
      const bar = html`<rect key=${name} class="fill-${name}" x=${from} width=${width} height="4" />`;
      from += width;
      return bar;
    })}
  </svg>`;
}
