// One job: its state and times, its counts, its holder, and its body as text, JSON or hexadecimal.
import { BASE, get, path, session } from "../api.js";
import { asks, fits, putJob, some } from "../actions.js";
import { MenuButton } from "../dialog.js";
import { html, useMemo, useState } from "../dom.js";
import { age, bytes, count, counted, exactMoment } from "../format.js";
import { usePoll } from "../live.js";
import { copy, Empty, Facts, Fault, Loading, Moment, Pick, Plain, useTitle, Stale, State } from "../parts.js";
import { connectionHref, jobHref, navigate, tubeHref } from "../route.js";

const ROW = 16; // bytes in a line of hex
const HEX_MAX = 16_384;
const WHOLE_MAX = 1_048_576;
const REASONS = { tries: "it had all of its tries", ttl: "no worker took it in time" }; // others are a worker's words
const NAMES = { kick: "Kick", bury: "Bury", release: "Release" };

export function Job({ id }) {
  useTitle(`Job ${id}`);
  const isNumber = /^[1-9]\d{0,18}$/.test(id);
  const [most, setMost] = useState(65_536);
  const { data: job, problem, at, loading, reload } = usePoll(
    `job ${id} ${most}`,
    (signal) => (isNumber ? get(path`/jobs/${id}`, { body: most }, signal) : Promise.resolve(null)),
    2000,
  );
  if (!isNumber) return html`<${Empty} title="A job is named by its number."><p><a href="/jobs">Jobs</a></p></${Empty}>`;
  if (!job && problem?.status === 404) return html`<${Gone} id=${id} />`;
  if (!job && problem) return html`<${Fault} problem=${problem} reload=${reload} what="The job cannot be shown" />`;
  if (loading) return html`<${Loading} />`;
  const gone = problem?.status === 404;
  const act = (action) => some([job], action, reload);
  return html`<article class="job">
    <div class="page-head">
      <h1><span class="kind">Job</span> ${job.id}</h1>
      <span class="kind-line">${gone ? html`<span class="tag warn">gone; this is what it was</span>` : html`<${State} state=${job.state} />`} in <a href=${tubeHref(job.tube)}>${job.tube}</a></span>
      <div class="push">${session.mayChange && html`
        ${!gone && ["kick", "bury", "release"].filter((action) => fits(action, job)).map((action) => html`<button key=${action} type="button" onClick=${() => act(action)}>${NAMES[action]}${asks(action, [job]) ? "…" : ""}</button>`)}
        ${!gone && html`<button type="button" class="danger-text" onClick=${() => act("delete")}>Delete…</button>`}
        <${MenuButton} label="More actions" items=${() => [
          !gone && { text: "Change priority, delay, ttr…", run: () => act("change") },
          !gone && { text: "Move…", disabled: !fits("move", job), run: () => act("move") },
          { text: "Put a copy…", disabled: !job.body.whole, run: () => putCopy(job) },
        ]}>More ▾</${MenuButton}>`}
      </div>
    </div>
    <${Stale} problem=${gone ? null : problem} at=${at} reload=${reload} />
    <${Times} job=${job} at=${at} gone=${gone} />
    <${Facts} items=${[
      ["Priority", count(job.pri)],
      ["Delay", age(job.delay_s)],
      ["Time to run", age(job.ttr_s)],
      ["Size", bytes(job.size)],
      ["Reserved", times(job.counts.reserves)],
      ["Timed out", times(job.counts.timeouts)],
      ["Released", times(job.counts.releases)],
      ["Buried", times(job.counts.buries)],
      ["Kicked", times(job.counts.kicks)],
      job.tags?.text && ["Tags", job.tags.text],
      job.tags && ["Tried", times(job.tags.tried)],
      job.tags?.reason && ["Reason", REASONS[job.tags.reason] ?? job.tags.reason],
      job.holder !== null && ["Held by", html`<a href=${connectionHref(job.holder)}>connection ${job.holder}</a>`],
      job.segment !== null && ["Segment of the journal", html`<a href="/journal">${job.segment}</a>`],
    ]} />
    <${Events} events=${job.events} />
    <${Body} job=${job} most=${most} setMost=${setMost} />
  </article>`;
}

const times = (n) => (n ? counted(n, "time") : "never");

/** The job's life as a line: its put, known events, its present state. */
function Times({ job, at, gone }) {
  const now = at / 1000;
  const since = now - job.since_s;
  const last = {
    ready: ["ready", "since", job.counts.reserves === 0 ? "no worker has had it yet" : null],
    reserved: ["reserved", "since", `${age(job.time_left_s)} left, then it is ready again`],
    delayed: ["delayed", "since", `ready in ${age(job.time_left_s)}`],
    buried: ["buried", "since", why(job)],
  }[job.state];
  const steps = [["put", job.created, `${age(job.age_s)} ago`]];
  if (job.counts.reserves) {
    const tale = [`reserved ${times(job.counts.reserves)}`];
    for (const [key, word] of [["timeouts", "timed out"], ["releases", "released"], ["buries", "buried"], ["kicks", "kicked"]]) {
      if (job.counts[key]) tale.push(`${word} ${times(job.counts[key])}`);
    }
    steps.push(["then", null, tale.join(", ")]);
  }
  steps.push([last[0], since, `for ${age(job.since_s)}${last[2] ? `; ${last[2]}` : ""}`]);
  if (gone) steps.push(["gone", null, "deleted, by a worker or an operator"]);
  return html`<ol class="times" aria-label="Its times">${steps.map(([word, begun, says]) => html`<li key=${word} class="step-${word}">
    <b>${word}</b> ${begun !== null && html`<${Moment} at=${begun} />`} <span class="quiet" title=${begun === null ? "" : exactMoment(begun)}>${says}</span>
  </li>`)}</ol>`;
}

/** What has happened to the job lately, where the policy of its tube keeps that. */
function Events({ events }) {
  if (!events?.length) return null;
  return html`<section class="part"><h2>Events</h2><table class="plain">
    <tbody>${[...events].reverse().map(({ event, at, connection }) => html`<tr key=${`${at} ${event}`}><th scope="row">${event}</th><td><${Moment} at=${at} /></td><td>${connection === null ? "" : html`by <a href=${connectionHref(connection)}>connection ${connection}</a>`}</td></tr>`)}</tbody>
  </table></section>`;
}

/** Why the job is probably buried, from its counts: the server is not told. */
function why(job) {
  const { counts } = job;
  if (!counts.reserves) return "no worker has had it: an operator buried it";
  if (counts.timeouts) return `its time ran out ${times(counts.timeouts)} before`;
  if (counts.buries > 1) return `it was kicked and buried again, ${times(counts.buries)} in all`;
  return "the worker that had it, or an operator, buried it";
}

const FORMS = [["text", "Text"], ["json", "JSON"], ["hex", "Hex"]];

function Body({ job, most, setMost }) {
  const { body } = job;
  const parsed = useMemo(() => asJson(body), [body.data]);
  const [wish, setWish] = useState(null);
  const fit = body.encoding === "base64" ? "hex" : parsed === undefined ? "text" : "json";
  const form = wish ?? fit;
  const raw = useMemo(() => (body.encoding === "text" ? new TextEncoder().encode(body.data) : Uint8Array.from(atob(body.data), (one) => one.charCodeAt(0))), [body.data]);
  const shown = useMemo(() => {
    if (form === "hex") return hex(raw.subarray(0, HEX_MAX));
    if (form === "json") return parsed === undefined ? null : pretty(parsed);
    return body.encoding === "text" ? body.data : new TextDecoder("utf-8").decode(raw);
  }, [form, body.data]);
  const cut = form === "hex" && raw.length > HEX_MAX;
  return html`<section class="part">
    <header class="head-line body-head"><h2>Body</h2>
      <${Pick} label="Form of the body" value=${form} onChange=${setWish} options=${FORMS.filter(([one]) => one !== "json" || parsed !== undefined)} />
      <span class="push"></span>
      ${shown !== null && html`<button type="button" class="small" onClick=${() => copy(shown, "the body")}>Copy</button>`}
      <a class="button small" href=${`${BASE}/jobs/${job.id}/body`} download=${`job-${job.id}`}>Download</a>
    </header>
    ${!body.whole && html`<p class="stale">The first ${bytes(raw.length)} of ${bytes(job.size)}. ${most < WHOLE_MAX && html`<button type="button" class="link" onClick=${() => setMost(WHOLE_MAX)}>Show ${job.size > WHOLE_MAX ? `the first ${bytes(WHOLE_MAX)}` : "all"}</button>`}</p>`}
    ${job.size === 0
      ? html`<p class="quiet">The body is empty.</p>`
      : html`<pre class="body" tabindex="0" aria-label="Body">${form === "json" ? tinted(shown) : html`<${Plain} text=${shown} />`}</pre>`}
    ${cut && html`<p class="quiet">The first ${bytes(HEX_MAX)}; the download has all.</p>`}
  </section>`;
}

function asJson(body) {
  if (body.encoding !== "text" || !body.whole || !/^\s*[[{"]/.test(body.data)) return undefined;
  try {
    return JSON.parse(body.data);
  } catch {
    return undefined;
  }
}

const LINE = 80;

/** JSON in lines: arrays stay on a line while they fit. */
export function pretty(value, indent = "") {
  const flat = JSON.stringify(value);
  if (value === null || typeof value !== "object" || flat.length <= 2) return flat;
  const isList = Array.isArray(value);
  if (isList && indent.length + flat.length <= LINE && !value.some((one) => one !== null && typeof one === "object" && !Array.isArray(one))) return spaced(value);
  const inner = `${indent}  `;
  const lines = isList ? value.map((one) => inner + pretty(one, inner)) : Object.entries(value).map(([key, one]) => `${inner}${JSON.stringify(key)}: ${pretty(one, inner)}`);
  return `${isList ? "[" : "{"}\n${lines.join(",\n")}\n${indent}${isList ? "]" : "}"}`;
}

const spaced = (value) => (Array.isArray(value) ? `[${value.map(spaced).join(", ")}]` : JSON.stringify(value));

const TOKENS = /("(?:[^"\\]|\\.)*")(\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
const TINTED_MAX = 60_000;

/** JSON with colours for names and values. */
function tinted(text) {
  if (text.length > TINTED_MAX) return html`<${Plain} text=${text} />`;
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(TOKENS)) {
    if (found.index > at) pieces.push(text.slice(at, found.index));
    const kind = found[2] !== undefined ? "j-name" : found[1] !== undefined ? "j-text" : "j-value";
    pieces.push(html`<span class=${kind}><${Plain} text=${found[1] ?? found[0]} /></span>`, found[2] ?? "");
    at = found.index + found[0].length;
  }
  pieces.push(text.slice(at));
  return pieces;
}

function hex(raw) {
  const lines = [];
  for (let at = 0; at < raw.length; at += ROW) {
    const row = [...raw.subarray(at, at + ROW)];
    const codes = row.map((one) => one.toString(16).padStart(2, "0"));
    const left = codes.slice(0, 8).join(" ");
    const right = codes.slice(8).join(" ");
    const text = row.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : "·")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${left.padEnd(23)}  ${right.padEnd(23)}  ${text}`);
  }
  return lines.join("\n");
}

function putCopy(job) {
  const body = job.body.encoding === "text" ? { body: job.body.data } : { base64: job.body.data };
  putJob({ tube: job.tube, pri: job.pri, ttr_s: job.ttr_s, ...body }, (put) => navigate(jobHref(put.id)));
}

function Gone({ id }) {
  return html`<${Empty} title=${`There is no job ${id}.`}>
    <p>It was deleted, or there never was one with this number.</p><p class="buttons-line"><a class="button" href="/jobs">Jobs</a></p>
  </${Empty}>`;
}
