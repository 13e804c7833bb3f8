// Keys, the words of the protocol, the grammar of filters, and lines to begin with.
import { html } from "../dom.js";
import { KEYS } from "../keys.js";
import { useLive } from "../live.js";
import { useTitle, State, WORDS as TERMS } from "../parts.js";
import { PutLine } from "./overview.js";

const SHORTCUTS = [
  [["/"], "to the filter of the page"], [["Esc"], "out of a field, a question, a menu"], [["?"], "this page"],
  [["p"], "pause all refreshing, or go on"],
  [["g", "o"], "overview"], [["g", "t"], "tubes"], [["g", "j"], "jobs"], [["g", "c"], "connections"], [["g", "u"], "users"], [["g", "r"], "policies"], [["g", "l"], "journal"], [["g", "a"], "audit"],
  [["↑", "↓"], "from row to row; also j and k, Page up and down, Home, End"], [["Enter"], "open the row"], [["x"], "select the row; with Shift all from the last one on"],
];
const WORDS = [
  ["ready", "A worker may get it."],
  ["reserved", "A worker holds it. When its time to run is over it becomes ready again."],
  ["delayed", "It becomes ready when its delay is over."],
  ["buried", "A worker has set it aside. It stays until a client kicks or deletes it."],
];
const EXAMPLES = [
  ["tube:mail state:buried", "the buried jobs of mail"],
  ["state:ready age>1h", "ready jobs that have waited for more than an hour"],
  ['tube:mail* body:"user 42"', "jobs of all tubes that begin with mail, whose body has these words"],
  ["body:/order-[0-9]{6}/ -state:buried", "a regular expression; a leading - negates a term"],
  ["timeouts>3", "jobs whose workers are too slow, or die"],
  ["id:100..200 pri<1024 size>1k", "several terms must all hold"],
];

export function Help() {
  useTitle("Help");
  const { server } = useLive();
  return html`<article class="help">
    <div class="page-head"><h1>Help</h1></div>
    <div class="two-columns">
      <section><h2>Keys</h2><table class="plain"><tbody>${SHORTCUTS.map(([keys, says]) => html`<tr key=${says}><th scope="row">${keys.map((key) => html`<kbd key=${key}>${key}</kbd> `)}</th><td>${says}</td></tr>`)}</tbody></table></section>
      <section>
        <h2>States of a job</h2><table class="plain"><tbody>${WORDS.map(([state, says]) => html`<tr key=${state}><th scope="row"><${State} state=${state} /></th><td>${says}</td></tr>`)}</tbody></table>
        <h2>Words</h2><table class="plain"><tbody>${Object.entries(TERMS).map(([word, says]) => html`<tr key=${word}><th scope="row">${word}</th><td>${says}</td></tr>`)}</tbody></table>
        <h2>Filters</h2>
        <table class="plain"><tbody>${EXAMPLES.map(([text, says]) => html`<tr key=${text}><td><a href=${`/jobs?filter=${encodeURIComponent(text)}`}><code>${text}</code></a></td><td>${says}</td></tr>`)}</tbody></table>
      </section>
      <section><h2>What a filter knows</h2><table class="plain"><tbody>${Object.entries(KEYS).map(([key, about]) => html`<tr key=${key}><th scope="row"><code>${key}</code></th><td>${about.says}</td></tr>`)}<tr><th scope="row"><code>word</code></th><td>the same as body:word</td></tr></tbody></table></section>
      <section><h2>From a shell</h2>
        <p class="quiet">This line puts a job into the tube default:</p><${PutLine} server=${server} />
        <p class="quiet"><code>geventstalk top</code> shows the same figures in a terminal. The API is at <a href="/api/v1/openapi.json" target="_blank" rel="noreferrer">/api/v1</a>, metrics are at <a href="/metrics" target="_blank" rel="noreferrer">/metrics</a>.</p>
      </section>
    </div>
  </article>`;
}
