// The input of a filter: its terms in colours, suggestions, and the fault that the server finds.
import { get } from "./api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { suggest, terms } from "./filter.js";

const SUGGESTED_MAX = 8;

/** value: the present filter; problem: the server's about it; onChange(filter): another one was entered. */
export function FilterLine({ value, problem, onChange }) {
  const [text, setText] = useState(value);
  const [caret, setCaret] = useState(null); // null without the focus
  const [tubes, setTubes] = useState([]);
  const [chosen, setChosen] = useState(-1);
  const input = useRef(null);
  const colours = useRef(null);
  const wanted = useRef(null);

  useEffect(() => setText(value), [value]);

  const found = caret === null ? null : suggest(text, caret, tubes);
  const items = found?.items.slice(0, SUGGESTED_MAX) ?? [];
  const word = found ? text.slice(found.from, caret) : "";
  const name = /^-?tube:(?:.*,)?([^*,]*)$/.exec(word)?.[1];
  const isChosen = useRef(false);
  isChosen.current = chosen >= 0;

  useEffect(() => {
    if (name === undefined) return undefined;
    const control = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const page = await get("/tubes", { match: name, limit: SUGGESTED_MAX, sort: name ? "name" : "total", descending: !name }, control.signal);
        if (!isChosen.current) setTubes(page.tubes.map((tube) => tube.name)); // chosen suggestions stay in place
      } catch {
        // Typing works without suggestions.
      }
    }, 80);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [name]);

  useLayoutEffect(() => {
    if (wanted.current !== null) {
      input.current.setSelectionRange(wanted.current, wanted.current);
      wanted.current = null;
    }
    colours.current.scrollLeft = input.current.scrollLeft;
  });

  const typed = (event) => {
    setText(event.target.value);
    setCaret(event.target.selectionStart);
    setChosen(-1);
  };
  const take = (item) => {
    const open = item.open || /[:<>=]$/.test(item.text);
    const rest = text.slice(found.to);
    const next = text.slice(0, found.from) + item.text + (open || rest.startsWith(" ") ? "" : " ") + rest;
    const at = found.from + item.text.length + (open ? 0 : 1);
    setText(next);
    setCaret(at);
    setChosen(-1);
    wanted.current = at;
    input.current.focus();
  };
  const enter = (next) => {
    setCaret(null);
    setChosen(-1);
    onChange(next.trim());
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter") {
      if (chosen >= 0 && items[chosen]) take(items[chosen]);
      else enter(text);
    } else if (event.key === "ArrowDown" && items.length) setChosen((chosen + 1) % items.length);
    else if (event.key === "ArrowUp" && items.length) setChosen((Math.max(chosen, 0) - 1 + items.length) % items.length);
    else if (event.key === "Tab" && items.length && !event.shiftKey && word) take(items[Math.max(0, chosen)]);
    else if (event.key === "Escape" && caret !== null && items.length) setCaret(null);
    else return;
    event.preventDefault();
  };

  const wrong = problem?.at !== undefined && text.trim() === value ? problem : null;
  return html`<div class="filter-line">
    <div class="filter-box ${wrong ? "is-wrong" : ""}">
      <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M2 3.500h12M4.5 8h7M6.5 12.500h3" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" /></svg>
      <div class="filter-text">
        <div class="colours" ref=${colours} aria-hidden="true">${coloured(text, wrong)}</div>
        <input
          id="filter" ref=${input} data-filter type="text" role="combobox" aria-autocomplete="list" aria-label="Filter of jobs" aria-expanded=${items.length > 0} aria-controls="filter-list"
          aria-activedescendant=${chosen >= 0 ? `filter-item-${chosen}` : undefined} aria-invalid=${wrong ? "true" : undefined} aria-describedby="filter-wrong"
          autocomplete="off" autocapitalize="off" spellcheck=${false} maxlength="2000" placeholder="All jobs. Type tube: state: age> body: or a word   /"
          value=${text} onInput=${typed} onKeyDown=${onKeyDown}
          onClick=${(event) => setCaret(event.target.selectionStart)} onFocus=${(event) => setCaret(event.target.selectionStart)}
          onBlur=${() => setCaret(null)} onScroll=${(event) => { colours.current.scrollLeft = event.target.scrollLeft; }}
        />
      </div>
      ${text && html`<button type="button" class="small quiet-button" aria-label="Empty the filter" onClick=${() => { setText(""); enter(""); }}>×</button>`}
      <button type="button" class="small primary" onClick=${() => enter(text)}>Search</button>
    </div>
    <p id="filter-wrong" class="fault-text" role="status">${wrong ? wrong.message : ""}</p>
    <ul id="filter-list" class="suggestions" role="listbox" aria-label="Suggestions" hidden=${!items.length}>${items.map(
      (item, at) => html`<li
        key=${item.text} id="filter-item-${at}" role="option" aria-selected=${at === chosen}
        onPointerDown=${(event) => { event.preventDefault(); take(item); }}
      ><code>${item.text}</code><span>${item.says}</span></li>`,
    )}</ul>
  </div>`;
}

/** The text in coloured pieces, which lie under the input. From a fault on, all of it is wrong. */
function coloured(text, wrong) {
  const pieces = [];
  const end = wrong ? [...text].slice(0, wrong.at).join("").length : text.length; // the server counts code points
  let at = 0;
  for (const term of terms(text)) {
    if (term.to > end || (wrong && term.to === text.length)) break;
    pieces.push(text.slice(at, term.from));
    pieces.push(html`<span class="t-key">${text.slice(term.from, term.valueAt)}</span>`);
    pieces.push(html`<span class="t-value">${text.slice(term.valueAt, term.to)}</span>`);
    at = term.to;
  }
  const rest = text.slice(at);
  const word = rest.trimStart();
  return wrong ? [...pieces, rest.slice(0, -word.length || undefined), html`<span class="t-wrong">${word}</span>`] : [...pieces, rest];
}
