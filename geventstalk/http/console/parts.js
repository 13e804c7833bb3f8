// Small components of every page: states, ages, numbers that show their changes, and placeholders.
import { session } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { age, count, exactly, exactMoment, moment, pieces, visible } from "./format.js";
import { say } from "./dialog.js";

export const STATES = ["ready", "reserved", "delayed", "buried"];

const SHAPES = {
  ready: html`<circle cx="6" cy="6" r="5" fill="currentColor" />`,
  reserved: html`<circle cx="6" cy="6" r="4.2" fill="none" stroke="currentColor" stroke-width="1.6" /><path d="M6 1a5 5 0 0 1 0 10z" fill="currentColor" />`,
  delayed: html`<circle cx="6" cy="6" r="4.2" fill="none" stroke="currentColor" stroke-width="1.6" /><path d="M6 3.400V6l1.8 1.3" fill="none" stroke="currentColor" stroke-width="1.4" />`,
  buried: html`<path d="M1.5 1.500h9v9h-9z" fill="currentColor" />`,
};

/** The symbol and the word of a state. */
export function Shape({ state }) {
  return html`<svg class="shape s-${state}" viewBox="0 0 12 12" aria-hidden="true">${SHAPES[state]}</svg>`;
}

export function State({ state }) {
  return html`<span class="state s-${state}"><${Shape} state=${state} />${state}</span>`;
}

/** A text of others: what is hidden in it is an escape. */
export function Plain({ text }) {
  return pieces(text).map((piece, at) => (at % 2 ? html`<span class="escape" title="A character that is not seen, or turns the text">${piece}</span>` : piece));
}

/** Words of the console, and what they stand for. The page of help has them, too. */
export const WORDS = {
  urgent: "with a priority below 1,024",
  "order held": "while the pointer or the keyboard is among the rows, only the figures change",
  holds: "the jobs that a client has reserved",
  waits: "for how long a client has waited for a job",
  silent: "since when a client has sent nothing",
  "held up": "what keeps a client from going on: the journal is behind, or the client does not read its replies",
};

/** A word that explains itself, to a pointer and to the keyboard. */
export function Term({ word, text = word }) {
  return html`<abbr title=${WORDS[word]} tabindex="0">${text}</abbr>`;
}

/** A span of time; the exact one on hover. */
export function Age({ s, quiet }) {
  if (s === null || s === undefined) return html`<span class="none">–</span>`;
  return html`<span class=${quiet ? "quiet" : null} title=${exactly(s)}>${age(s)}</span>`;
}

/** A time; the exact one on hover. */
export function Moment({ at }) {
  if (at === null || at === undefined) return html`<span class="none">–</span>`;
  return html`<time title=${exactMoment(at)} datetime=${new Date(at * 1000).toISOString()}>${moment(at)}</time>`;
}

/** A number that is tinted for a moment when it changes in place. */
export function Num({ n, text, href, of }) {
  const before = useRef(n);
  const turn = useRef(0);
  if (before.current !== n) {
    if (before.current !== undefined && n !== undefined) turn.current += 1;
    before.current = n;
  }
  const tick = turn.current ? (turn.current % 2 ? "tick-a" : "tick-b") : "";
  const shown = text ?? count(n);
  const quiet = n === 0 || n === null ? "zero" : "";
  const label = of ? `${shown} ${of}` : undefined;
  if (href && n) return html`<a class="num ${tick} ${quiet}" href=${href} aria-label=${label}>${shown}</a>`;
  return html`<span class="num ${tick} ${quiet}">${shown}</span>`;
}

/** The placeholder of data that loads: shown only after 300 ms, so that a quick answer brings no flicker. */
export function Loading({ what = "Loading" }) {
  return html`<div class="blank late" role="status"><span class="dots" aria-hidden="true"><i /><i /><i /></span>${what}…</div>`;
}

/** The placeholder of data that cannot be shown. */
export function Fault({ problem, reload, what = "This cannot be shown" }) {
  return html`<div class="blank fault" role="alert">
    <p><b>${what}.</b> ${problem.message}</p>
    ${reload && html`<p><button type="button" onClick=${reload}>Try again</button></p>`}
  </div>`;
}

/** The note above old data. */
export function Stale({ problem, at, reload }) {
  if (!problem) return null;
  return html`<p class="stale" role="status">
    These are the figures of ${at ? moment(at / 1000) : "an earlier moment"}. ${problem.message}
    ${reload && html` <button type="button" class="link" onClick=${reload}>Try again</button>`}
  </p>`;
}

/** The placeholder of an empty list. */
export function Empty({ title, children }) {
  return html`<div class="blank empty"><p class="head">${title}</p>${children}</div>`;
}

/** A line to copy. */
export function Line({ text }) {
  return html`<div class="line"><code tabindex="0">${text}</code><${Copy} text=${text} what="the line" /></div>`;
}

export async function copy(text, what = "") {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https the browser may refuse; a selected text field works everywhere.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "offscreen";
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) return say("The browser does not allow to copy.", { fault: true });
  }
  say(what ? `Copied ${what}.` : "Copied.");
}

export function Copy({ text, what, label = "Copy" }) {
  return html`<button type="button" class="small" onClick=${() => copy(text, what)}>${label}</button>`;
}

/** Saves a text as a file. */
export function download(name, text, type = "text/plain") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Facts as a list of names and values. */
export function Facts({ items }) {
  return html`<dl class="facts">${items
    .filter(Boolean)
    .map(([name, value, title]) => html`<div key=${name}><dt>${name}</dt><dd title=${title}>${value}</dd></div>`)}</dl>`;
}

/** A text field that calls onChange after a pause in typing. */
export function Search({ value, onChange, label, placeholder, id = "search", children }) {
  const [text, setText] = useState(value);
  const told = useRef(value);
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  useEffect(() => {
    if (value !== told.current) {
      told.current = value;
      setText(value);
    }
  }, [value]);
  const tell = (next) => {
    told.current = next;
    onChange(next);
  };
  return html`<label class="search">
    <span class="offscreen">${label}</span>
    <svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="7" cy="7" r="4.5" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M10.5 10.5 14 14" stroke="currentColor" stroke-width="1.5" /></svg>
    <input
      id=${id} type="search" data-filter autocomplete="off" spellcheck=${false} placeholder=${placeholder} value=${text}
      onInput=${(event) => {
        setText(event.target.value);
        clearTimeout(timer.current);
        timer.current = setTimeout(tell, 200, event.target.value);
      }}
      onKeyDown=${(event) => {
        if (event.key === "Enter") {
          clearTimeout(timer.current);
          tell(event.target.value);
        }
      }}
    />${children}
  </label>`;
}

/** Buttons that are on or off. */
export function Chips({ options, chosen, onChange, label }) {
  return html`<div class="chips" role="group" aria-label=${label}>${options.map(
    ([value, text]) => html`<button
      key=${value} type="button" class="chip" title=${WORDS[value]} aria-pressed=${chosen.includes(value)}
      onClick=${() => onChange(chosen.includes(value) ? chosen.filter((one) => one !== value) : [...chosen, value])}
    >${text}</button>`,
  )}</div>`;
}

/** One of a few, as buttons side by side. */
export function Pick({ options, value, onChange, label }) {
  return html`<div class="pick" role="group" aria-label=${label}>${options.map(
    ([one, text]) => html`<button key=${one} type="button" aria-pressed=${one === value} onClick=${() => onChange(one)}>${text}</button>`,
  )}</div>`;
}

/** The title of the window while this page is shown: the page, and the server's name. */
export function useTitle(text) {
  const { place } = session;
  useEffect(() => {
    document.title = visible([text, place, "geventstalk"].filter(Boolean).join(" · "));
  }, [text, place]);
}
