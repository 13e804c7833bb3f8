// The line in which a filter is typed: coloured by its grammar, with suggestions as one types, and what is wrong with it.
import { get } from "./api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { KEYS, parse, suggest } from "./filter.js";

const SUGGESTED_MAX = 8;

/** value: the filter that holds; onChange(filter): another one was entered. */
export function FilterLine({ value, onChange }) {
  const [text, setText] = useState(value);
  const [caret, setCaret] = useState(null); // where one types, while one types
  const [tubes, setTubes] = useState([]);
  const [chosen, setChosen] = useState(-1);
  const [touched, setTouched] = useState(false);
  const input = useRef(null);
  const colours = useRef(null);
  const wanted = useRef(null);

  useEffect(() => {
    setText(value);
    setTouched(false);
  }, [value]);

  const { terms, wrong } = parse(text);
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
        if (!isChosen.current) setTubes(page.tubes.map((tube) => tube.name)); // nothing moves under the hand
      } catch {
        // Suggestions are a help; without them one types on.
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
    setTouched(true);
  };
  const take = (item) => {
    const open = item.open || /[:<>=]$/.test(item.text);
    const rest = text.slice(found.to);
    const next = text.slice(0, found.from) + item.text + (open || rest.startsWith(" ") ? "" : " ") + rest;
    const at = found.from + item.text.length + (open ? 0 : 1);
    setText(next);
    setCaret(at);
    setChosen(-1);
    setTouched(true);
    wanted.current = at;
    input.current.focus();
  };
  const enter = (next) => {
    if (parse(next).wrong) return setTouched(true);
    setCaret(null);
    setChosen(-1);
    return onChange(next.trim());
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

  const showWrong = wrong && touched && (caret === null || !items.length);
  return html`<div class="filter-line">
    <div class="filter-box ${showWrong ? "is-wrong" : ""}">
      <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M2 3.500h12M4.5 8h7M6.5 12.500h3" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" /></svg>
      <div class="filter-text">
        <div class="colours" ref=${colours} aria-hidden="true">${coloured(text, terms, showWrong ? wrong : null)}</div>
        <input
          id="filter" ref=${input} data-filter type="text" role="combobox" aria-autocomplete="list" aria-label="Filter of jobs" aria-expanded=${items.length > 0} aria-controls="filter-list"
          aria-activedescendant=${chosen >= 0 ? `filter-item-${chosen}` : undefined} aria-invalid=${showWrong ? "true" : undefined} aria-describedby="filter-wrong"
          autocomplete="off" autocapitalize="off" spellcheck=${false} maxlength="2000" placeholder="All jobs. Type tube: state: age> body: or a word   /"
          value=${text} onInput=${typed} onKeyDown=${onKeyDown}
          onClick=${(event) => setCaret(event.target.selectionStart)} onFocus=${(event) => setCaret(event.target.selectionStart)}
          onBlur=${() => setCaret(null)} onScroll=${(event) => { colours.current.scrollLeft = event.target.scrollLeft; }}
        />
      </div>
      ${text && html`<button type="button" class="small quiet-button" aria-label="Empty the filter" onClick=${() => { setText(""); enter(""); }}>×</button>`}
      <button type="button" class="small primary" onClick=${() => enter(text)}>Search</button>
    </div>
    <p id="filter-wrong" class="fault-text" role="status">${showWrong ? wrong.text : ""}</p>
    <ul id="filter-list" class="suggestions" role="listbox" aria-label="Suggestions" hidden=${!items.length}>${items.map(
      (item, at) => html`<li
        key=${item.text} id="filter-item-${at}" role="option" aria-selected=${at === chosen}
        onPointerDown=${(event) => { event.preventDefault(); take(item); }}
      ><code>${item.text}</code><span>${item.says}</span></li>`,
    )}</ul>
  </div>`;
}

/** The text in pieces that have their colours; what is typed lies over it. */
function coloured(text, terms, wrong) {
  const pieces = [];
  let at = 0;
  const plain = (to) => {
    if (to > at) pieces.push(wrong ? html`<span class="t-wrong">${text.slice(at, to)}</span>` : text.slice(at, to));
    at = to;
  };
  for (const term of terms) {
    if (term.from > at) pieces.push(text.slice(at, term.from));
    const head = /^-?([a-z]+)(:|<=?|>=?)/.exec(text.slice(term.from, term.to));
    const split = head && KEYS[head[1]] ? term.from + head[0].length : term.from;
    if (split > term.from) pieces.push(html`<span class="t-key">${text.slice(term.from, split)}</span>`);
    pieces.push(html`<span class="t-value">${text.slice(split, term.to)}</span>`);
    at = term.to;
  }
  plain(text.length);
  return pieces;
}
