// The nodes that share a journal: the leader, the progress of each, and a change of the leader.
import { get, post, session } from "../api.js";
import { ask, say, work } from "../dialog.js";
import { html } from "../dom.js";
import { age, count } from "../format.js";
import { usePoll } from "../live.js";
import { Age, Empty, Facts, Fault, Loading, useTitle, Stale } from "../parts.js";
import { Table } from "../table.js";

const REPLICATION = {
  synchronous: "Each commit waits for a replica",
  asynchronous: "No commit waits for a replica: a failover of the database may lose what was acknowledged",
  none: "The database has no replica: the journal is where its one server keeps it",
};

export function Nodes() {
  useTitle("Nodes");
  const { data, problem, at, loading, reload } = usePoll("nodes", (signal) => get("/cluster", {}, signal), 3000);
  if (!data && problem?.status === 404) return html`<div><div class="page-head"><h1>Nodes</h1></div><${Empty} title="This server is no node of a cluster." /></div>`;
  if (!data && problem) return html`<${Fault} problem=${problem} reload=${reload} what="The nodes cannot be shown" />`;
  if (loading) return html`<${Loading} what="Asking the database" />`;
  const columns = [
    { id: "node", title: "Node", width: "w-name", cell: (one) => html`${one.node}${one.node === data.leader && html` <span class="tag hide-s">leads</span>`}` },
    { id: "address", title: "Address", hide: "s", cell: (one) => one.address },
    { id: "role", title: "Role", width: "w-state", cell: (one) => one.role },
    { id: "epoch", title: "epoch", num: true, width: "w-num", hide: "m", cell: (one) => count(one.epoch) },
    { id: "lag", title: "lag", num: true, width: "w-num", cell: (one) => count(one.lag) },
    { id: "seen", title: "last seen", num: true, width: "w-age", hide: "s", cell: (one) => html`<${Age} s=${one.seen_s} /> ago` },
    session.role === "admin" && { id: "promote", title: "", label: "Actions", width: "w-lead", cell: (one) => one.role === "standby" && html`<button type="button" class="small" onClick=${() => promote(one.node, data.leader, reload)}>Have it lead…</button>` },
  ].filter(Boolean);
  return html`<article>
    <div class="page-head"><h1>Nodes</h1>${data.console && data.leader !== session.node?.name && session.node?.serves === false && html`<a class="button primary" href=${data.console} target="_blank" rel="noopener">Console of ${data.leader}</a>`}</div>
    <${Stale} problem=${problem} at=${at} reload=${reload} />
    <${Facts} items=${[
      ["Leads", data.leader ?? html`<span class="warn-text">none${data.claims ? `; ${data.claims} takes over` : data.last ? `; the last was ${data.last}` : ""}</span>`],
      data.takeover_s !== null && ["Last takeover", html`<${Age} s=${data.takeover_s} /> ago`, "When the node that leads began to"],
      ["Takeovers", count(data.epoch), "Each time that a node begins to lead the epoch rises by one"],
      ["Lease", age(data.lease_s), "So long after its last heartbeat a node may lead"],
      data.wish && ["Asked to lead", data.wish === "*" ? "another node" : data.wish],
      data.replication && ["Replication", html`<span class=${data.replication === "asynchronous" ? "warn-text" : null}>${data.replication}</span>`, REPLICATION[data.replication]],
    ]} />
    <section class="part"><${Table} label="Nodes" columns=${columns} count=${data.nodes.length} rowAt=${(index) => data.nodes[index]} keyOf=${(one) => one.node} empty=${html`<${Empty} title="No node has told of itself." />`} /></section>
  </article>`;
}

async function promote(node, leader, after) {
  if (!(await ask({ title: `Have ${node} lead?`, text: `${leader ?? "The node that leads"} finishes what it has begun and hands over. Clients are passed on to ${node}.`, button: `Have ${node} lead` }))) return;
  try {
    await work({ title: `${node} takes over`, run: () => post("/cluster", { promote: node }) });
    say(`${node} leads.`);
  } catch (problem) {
    say(problem.message, { fault: true });
  }
  after();
}
