// Questions before harm, progress of work, menus, and short notes. They share one place on the page: <Dialogs>. A
// question returns a promise.
import { session } from "./api.js";
import { html, useLayoutEffect, useRef, useState } from "./dom.js";
import { visible } from "./format.js";

const shown = { dialogs: [], menu: null, notes: [] };
let again = () => {};
let lastNumber = 0;
const NOTE_MS = 6000;
const NOTE_WITH_UNDO_MS = 15_000;

function show(change) {
  Object.assign(shown, change);
  again((n) => n + 1);
}

/**
 * Asks. {title, text, button, danger, typed, fields, wide} → an object of the fields' values, or null.
 * typed: a word that has to be typed before the button works.
 */
export function ask(question) {
  return new Promise((resolve) => {
    const number = (lastNumber += 1);
    const done = (value) => {
      show({ dialogs: shown.dialogs.filter((one) => one.number !== number) });
      resolve(value);
    };
    show({ dialogs: [...shown.dialogs, { ...question, number, done }] });
  });
}

/**
 * Shows work that takes long. run(update, isCancelled) works and calls update({done, of, text}) with the progress.
 * {title, away}: with `away` the reader may leave and the work goes on.
 */
export function work({ title, away, run }) {
  return new Promise((resolve, reject) => {
    const number = (lastNumber += 1);
    const state = { number, kind: "work", title, away, done: 0, of: 0, text: "", cancelled: false };
    const close = () => show({ dialogs: shown.dialogs.filter((one) => one.number !== number) });
    state.cancel = () => {
      state.cancelled = true;
      show({});
    };
    state.leave = () => {
      close();
      say(`${title}: this goes on. What was done will be said here.`);
    };
    const late = setTimeout(() => show({ dialogs: [...shown.dialogs, state] }), 300);
    const update = (how) => {
      Object.assign(state, how);
      show({});
    };
    Promise.resolve(run(update, () => state.cancelled))
      .then(resolve, reject)
      .finally(() => {
        clearTimeout(late);
        close();
      });
  });
}

/** A short note. {fault, undo: {text, run}}: a fault stays until it is closed. */
export function say(text, { fault = false, undo = null } = {}) {
  const number = (lastNumber += 1);
  const note = { number, text, fault, undo };
  show({ notes: [...shown.notes.slice(-3), note] });
  if (!fault) setTimeout(forget, undo ? NOTE_WITH_UNDO_MS : NOTE_MS, number);
}

function forget(number) {
  if (document.querySelector(`.note[data-number="${number}"]:is(:hover, :focus-within)`)) {
    setTimeout(forget, NOTE_MS, number);
  } else {
    putAway(number);
  }
}

function putAway(number) {
  show({ notes: shown.notes.filter((one) => one.number !== number) });
}

/** A menu below an element. items: {text, run, danger, disabled} or null for a line. */
function openMenu(anchor, items, label) {
  show({ menu: shown.menu?.anchor === anchor ? null : { anchor, items: items.filter((item) => item !== undefined && item !== false), label } });
}

export const isOpen = () => shown.dialogs.length > 0 || shown.menu !== null;

/** Opens a menu. */
export function MenuButton({ items, label, children, small, quiet }) {
  return html`<button
    type="button" class="${small ? "small" : ""} ${quiet ? "quiet-button" : ""}" aria-haspopup="menu" aria-label=${children === "⋯" ? label : undefined}
    onClick=${(event) => openMenu(event.currentTarget, items(), label)}
  >${children}</button>`;
}

export function Dialogs() {
  const [, tick] = useState(0);
  again = tick;
  return html`
    ${shown.dialogs.map((one) => (one.kind === "work" ? html`<${Work} key=${one.number} ...${one} />` : html`<${Question} key=${one.number} ...${one} />`))}
    ${shown.menu && html`<${Menu} key=${String(shown.menu.label)} ...${shown.menu} />`}
    <div class="notes" role="status" aria-live="polite">${shown.notes.map(
      (note) => html`<div key=${note.number} class="note ${note.fault ? "fault" : ""}" data-number=${note.number}>
        <span>${typeof note.text === "string" ? visible(note.text) : note.text}</span>
        ${note.undo && html`<button type="button" class="small" onClick=${() => { putAway(note.number); note.undo.run(); }}>${note.undo.text}</button>`}
        <button type="button" class="small quiet-button" aria-label="Put this note away" onClick=${() => putAway(note.number)}>×</button>
      </div>`,
    )}</div>`;
}

function Modal({ onCancel, label, children, wide }) {
  const dialog = useRef(null);
  // Before anything is drawn: the next key is for the dialog already.
  useLayoutEffect(() => {
    const before = document.activeElement;
    const box = dialog.current;
    box.showModal();
    return () => {
      box.close(); // nothing beside an open one takes the focus
      (before?.isConnected ? before : document.getElementById("main"))?.focus({ preventScroll: true });
    };
  }, []);
  return html`<dialog
    ref=${dialog} class=${wide ? "wide" : ""} aria-label=${label}
    onCancel=${(event) => { event.preventDefault(); onCancel(); }}
  >${children}</dialog>`;
}

/** The server's name, in its colour. */
export const Place = () => html`<span class="place ${session.colour ? `place-${session.colour}` : ""}" title=${`This server is ${visible(session.place)}`}>${visible(session.place)}</span>`;

function Question({ title, text, button, danger, typed, fields = [], done, check, wide }) {
  const [values, setValues] = useState(() => Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""])));
  const [word, setWord] = useState("");
  const [touched, setTouched] = useState(false);
  const fault = check?.(values) ?? null;
  const ready = !fault && (!typed || word === typed);
  const set = (name, value) => {
    setTouched(true);
    setValues((old) => ({ ...old, [name]: value }));
  };
  const submit = (event) => {
    event.preventDefault();
    if (ready) done(values);
  };
  return html`<${Modal} onCancel=${() => done(null)} label=${title} wide=${wide}>
    <form onSubmit=${submit}>
      ${session.place && html`<p class="at-place">on <${Place} /></p>`}
      <h2>${visible(title)}</h2>
      ${text && html`<p>${visible(text)}</p>`}
      ${fields.length > 0 && html`<div class="fields">${fields.map((field) => html`<${Field} key=${field.name} ...${field} value=${values[field.name]} set=${(value) => set(field.name, value)} />`)}</div>`}
      ${typed && html`<label class="field typed"><span>Type <code>${typed}</code> to go on</span><input
        name="typed" autocomplete="off" spellcheck=${false} autofocus value=${word} onInput=${(event) => setWord(event.target.value)} /></label>`}
      ${fault && touched && html`<p class="fault-text" role="alert">${fault}</p>`}
      <div class="buttons">
        <button type="button" autofocus=${danger && !typed && !fields.length} onClick=${() => done(null)}>Cancel</button>
        <button type="submit" class=${danger ? "danger" : "primary"} disabled=${!ready} autofocus=${!danger && !fields.length}>${typeof button === "function" ? button(values) : button}</button>
      </div>
    </form>
  </${Modal}>`;
}

function Field({ name, label, kind = "text", value, set, hint, min, max, unit, options, list, autofocus, rows, third }) {
  const common = { name, value, autofocus, onInput: (event) => set(event.target.value), autocomplete: "off", spellcheck: false };
  const control =
    kind === "area"
      ? html`<textarea ...${common} rows=${rows ?? 5}></textarea>`
      : kind === "select"
        ? html`<select ...${common}>${options.map(([one, text]) => html`<option key=${one} value=${one} selected=${one === value}>${text}</option>`)}</select>`
        : html`<input ...${common} type=${kind} min=${min} max=${max} list=${list ? `${name}-list` : undefined} inputmode=${kind === "number" ? "numeric" : undefined} />`;
  return html`<label class="field ${third ? "third" : ""}"><span>${label}</span><span class="control">${control}${unit && html`<span class="unit">${unit}</span>`}</span>
    ${list && html`<datalist id="${name}-list">${list.map((one) => html`<option key=${one} value=${one} />`)}</datalist>`}
    ${hint && html`<small>${hint}</small>`}</label>`;
}

function Work({ title, text, done, of, cancel, cancelled, away, leave }) {
  return html`<${Modal} onCancel=${away ? leave : cancel} label=${title}>
    <h2>${title}</h2>
    <progress max=${of || 1} value=${of ? done : undefined} aria-label=${title}></progress>
    <p>${text}</p>
    <div class="buttons">
      ${away && html`<button type="button" onClick=${leave}>Go on without me</button>`}
      <button type="button" disabled=${cancelled} onClick=${cancel}>${cancelled ? "Stopping…" : "Stop"}</button>
    </div>
  </${Modal}>`;
}

function Menu({ anchor, items, label }) {
  const list = useRef(null);
  const close = () => {
    show({ menu: null });
    if (anchor.isConnected) anchor.focus({ preventScroll: true });
  };
  useLayoutEffect(() => {
    const place = anchor.getBoundingClientRect();
    const box = list.current;
    const left = Math.max(8, Math.min(place.right - box.offsetWidth, innerWidth - box.offsetWidth - 8));
    const below = place.bottom + 4 + box.offsetHeight < innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? place.bottom + 4 : Math.max(8, place.top - box.offsetHeight - 4)}px`;
    box.querySelector("button:not(:disabled)")?.focus({ preventScroll: true });
    const outside = (event) => {
      if (!box.contains(event.target) && !anchor.contains(event.target)) show({ menu: null });
    };
    anchor.setAttribute("aria-expanded", "true");
    addEventListener("pointerdown", outside, true);
    addEventListener("scroll", close, { passive: true });
    return () => {
      anchor.setAttribute("aria-expanded", "false");
      removeEventListener("pointerdown", outside, true);
      removeEventListener("scroll", close);
    };
  }, [anchor]);
  const onKeyDown = (event) => {
    const all = [...list.current.querySelectorAll("button:not(:disabled)")];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined) all[to % all.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div ref=${list} class="menu" role="menu" aria-label=${label} onKeyDown=${onKeyDown}>${items.map((item, at) =>
    item === null
      ? html`<hr key=${at} />`
      : html`<button
          key=${at} type="button" role="menuitem" class=${item.danger ? "danger-text" : ""} disabled=${item.disabled}
          onClick=${() => { close(); item.run(); }}
        >${item.text}</button>`,
  )}</div>`;
}
