// Long tables: only the rows in view exist. Rows have one height, the page itself scrolls, and a row has its place by its
// number. Callbacks tell the owner of the rows which are in view, and when they must keep their places: while the pointer
// or the keyboard is among them.
import { isOpen } from "./dialog.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { Empty, Fault, Loading, WORDS } from "./parts.js";

const BEYOND = 12; // rows that exist above and below the view

/**
 * columns: {id, title, cell(row), num, sort, first: "ascending"|"descending", width, hide: "s"|"m"|"n"|"l", label, word}
 * rowAt(index): a row, or undefined while that row is not here. keyOf(row): a unique key.
 */
export function Table(props) {
  const { label, columns, count, rowAt, keyOf, sort, descending, onSort, onRange, onHold, onOpen } = props;
  const { problem, reload, loading, empty, selected, onSelect, rowClass } = props;
  const body = useRef(null);
  const [seen, setSeen] = useState([0, 40]);
  const [active, setActive] = useState(-1);
  const hold = useRef({ pointer: false, focus: false });
  const wantsFocus = useRef(false);

  const rowHeight = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) || 36;

  const measure = () => {
    if (!body.current) return;
    const height = rowHeight();
    const top = body.current.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / height) - BEYOND);
    const last = Math.max(first, Math.ceil((innerHeight - top) / height) + BEYOND);
    setSeen((old) => (old[0] === first && old[1] === last ? old : [first, last]));
  };
  useEffect(() => {
    let asked = 0;
    const soon = () => {
      cancelAnimationFrame(asked);
      asked = requestAnimationFrame(measure);
    };
    addEventListener("scroll", soon, { passive: true });
    addEventListener("resize", soon);
    measure();
    return () => {
      cancelAnimationFrame(asked);
      removeEventListener("scroll", soon);
      removeEventListener("resize", soon);
    };
  }, []);
  useEffect(measure, [count]);

  const first = Math.min(seen[0], Math.max(0, count - 1));
  const last = Math.min(seen[1], count);
  useEffect(() => onRange?.(first, last), [first, last]);

  const tell = (what) => {
    const before = hold.current.pointer || hold.current.focus;
    Object.assign(hold.current, what);
    const now = hold.current.pointer || hold.current.focus;
    if (now !== before) onHold?.(now);
  };
  useEffect(() => () => onHold?.(false), []);

  useLayoutEffect(() => {
    if (!wantsFocus.current) return;
    const row = body.current?.querySelector(`tr[data-index="${active}"]`);
    if (row) {
      wantsFocus.current = false;
      row.focus({ preventScroll: true });
    }
  });

  /** The first row that lies below the head of the table. */
  const inView = () => Math.max(0, Math.ceil((underHead() - body.current.getBoundingClientRect().top) / rowHeight()));

  const underHead = () => {
    const heads = [...body.current.parentElement.tHead.rows[0].cells]; // they stay at the top, below the bar
    return Math.max(...heads.map((head) => head.getBoundingClientRect().bottom));
  };

  const go = (index) => {
    const next = Math.max(0, Math.min(count - 1, index));
    const height = rowHeight();
    const top = body.current.getBoundingClientRect().top + next * height;
    const lowest = underHead();
    if (top < lowest - 1) scrollBy(0, top - lowest);
    else if (top + height > innerHeight - 8) scrollBy(0, top + height - innerHeight + 8);
    wantsFocus.current = true;
    setActive(next);
    measure();
  };

  const onKeyDown = (event) => {
    if (event.defaultPrevented || isOpen() || event.ctrlKey || event.metaKey || event.altKey) return;
    const { target } = event;
    if (!body.current || target.closest("input:not([type=checkbox]), select, textarea")) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key; // with Shift, x comes as X
    const within = body.current.parentElement.contains(target);
    // Without a click, too: j and k begin at the rows in view. The other keys scroll the page and press its buttons.
    if (!within && key !== "j" && key !== "k") return;
    const at = active < 0 ? (within ? first : inView()) : Math.min(active, count - 1);
    const page = Math.max(1, Math.floor(innerHeight / rowHeight()) - 4);
    const row = rowAt(at);
    const steps = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, Home: 0, End: count - 1, PageDown: at + page, PageUp: at - page };
    if (key in steps) go(active < 0 ? at : steps[key]);
    else if (key === "Enter" && onOpen && row && target.tagName === "TR") onOpen(row);
    else if ((key === "x" || (key === " " && target.tagName === "TR")) && onSelect && row) onSelect(row, at, event.shiftKey);
    else return;
    event.preventDefault();
  };
  const latestKey = useRef(onKeyDown);
  latestKey.current = onKeyDown;
  useEffect(() => {
    // Behind the keys of all pages (app.js), so that `g j` leaves for the jobs.
    const call = (event) => latestKey.current(event);
    addEventListener("keydown", call);
    return () => removeEventListener("keydown", call);
  }, []);

  const rows = [];
  for (let index = first; index < last; index += 1) rows.push([index, rowAt(index)]);
  // No cell spans others: with columns that are hidden on narrow screens, that would add columns.
  const tabStop = active >= first && active < last ? active : first;

  const heading = (column) => {
    const sorted = column.sort && sort === column.sort;
    const flip = () => onSort(column.sort, sorted ? !descending : column.first === "descending");
    return html`<th
      key=${column.id} scope="col" title=${WORDS[column.word]} class="${classes(column)} ${column.width ?? ""}"
      aria-sort=${sorted ? (descending ? "descending" : "ascending") : column.sort && onSort ? "none" : undefined}
    >${column.sort && onSort
      ? html`<button type="button" class="sort" onClick=${flip}>${column.title}<span class="arrow" aria-hidden="true">${sorted ? (descending ? "↓" : "↑") : ""}</span></button>`
      : column.label
        ? html`<span class="offscreen">${column.label}</span>`
        : column.title}</th>`;
  };

  if (problem && !count) return html`<${Fault} problem=${problem} reload=${reload} what="The rows cannot be shown" />`;
  if (loading && !count) return html`<${Loading} />`;
  if (!count) return empty ?? html`<${Empty} title="Nothing here." />`;
  return html`<table class="rows" aria-label=${label} aria-rowcount=${count + 1}>
    <thead><tr aria-rowindex="1">${onSelect && html`<th scope="col" class="check w-check"><${AllBox} ...${props} /></th>`}${columns.map(heading)}</tr></thead>
    <tbody
      ref=${body}
      onPointerEnter=${(event) => event.pointerType !== "touch" && tell({ pointer: true })}
      onPointerLeave=${() => tell({ pointer: false })}
      onFocusIn=${(event) => tell({ focus: event.target.matches(":focus-visible") })}
      onFocusOut=${() => tell({ focus: false })}
    >
      ${first > 0 && html`<tr key="above" class="space" aria-hidden="true"><td ref=${tall(first)}></td></tr>`}
      ${rows.map(([index, row]) =>
        row === undefined
          ? html`<tr key=${`#${index}`} class="absent" aria-rowindex=${index + 2}><td><span class="bar" /></td></tr>`
          : html`<tr
              key=${keyOf(row)} data-index=${index} data-key=${keyOf(row)} aria-rowindex=${index + 2}
              tabindex=${index === tabStop ? 0 : -1} aria-selected=${onSelect ? selected.has(keyOf(row)) : undefined}
              class="${onOpen ? "opens" : ""} ${rowClass?.(row) ?? ""}"
              onFocusIn=${() => setActive(index)}
              onClick=${(event) => {
                if (!onOpen || event.defaultPrevented || event.target.closest("a, button, input, label")) return;
                if (!String(getSelection())) onOpen(row);
              }}
            >
              ${onSelect && html`<td class="check"><input
                type="checkbox" tabindex="-1" aria-label=${`Select the row of ${keyOf(row)}`} checked=${selected.has(keyOf(row))}
                onClick=${(event) => onSelect(row, index, event.shiftKey)}
              /></td>`}
              ${columns.map((column) => html`<td key=${column.id} class=${classes(column)}>${column.cell(row)}</td>`)}
            </tr>`,
      )}
      ${last < count && html`<tr key="below" class="space" aria-hidden="true"><td ref=${tall(count - last)}></td></tr>`}
    </tbody>
  </table>`;
}

const hidden = (column) => (column.hide ? `hide-${column.hide}` : "");
const classes = (column) => `${column.num ? "right" : ""} ${hidden(column)} c-${column.id}`;

/** A gap of the height of this many rows. */
function tall(rows) {
  return (cell) => {
    if (cell) cell.style.height = `calc(var(--row) * ${rows})`;
  };
}

function AllBox({ selected, onSelectAll, count }) {
  return html`<input
    type="checkbox" aria-label="Select all rows that are loaded" checked=${selected.size > 0 && selected.size >= count}
    ref=${(box) => box && (box.indeterminate = selected.size > 0 && selected.size < count)}
    onClick=${onSelectAll}
  />`;
}

/** Replaces rows by fresh ones. Held rows keep their order; only their figures change. */
export function merged(old, fresh, offset, keyOf, held) {
  const rows = old.slice();
  if (!held) {
    fresh.forEach((row, at) => (rows[offset + at] = row));
    return rows;
  }
  const byKey = new Map(fresh.map((row) => [keyOf(row), row]));
  for (const at of rows.keys()) {
    const row = rows[at];
    if (row !== undefined && byKey.has(keyOf(row))) rows[at] = byKey.get(keyOf(row));
  }
  return rows;
}
