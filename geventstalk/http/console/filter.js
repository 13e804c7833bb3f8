// The terms of a filter, for colours, suggestions and questions. Pure. The server parses the filter (filters.py) and finds
// its faults. Positions count UTF-16 units, as an input field does.

import { KEYS } from "./keys.js"; // made by the server, of its own filters

export const STATES = ["ready", "delayed", "reserved", "buried"];
const SPACE = " \t\r\n";

// A term ends at a space, except within quotes and regular expressions.
const TERM = /(?=[^ \t\r\n])-?(?:(?:body:)?"(?:\\["\\]|[^"])*"?|body:\/(?:\\[^]|[^\\/])*\/?)?[^ \t\r\n]*/gi;
const HEAD = /^-?([a-z]+)(:|<=?|>=?)/i;

/** The terms of a filter: {key, not, value, from, to, valueAt}. */
export function terms(text) {
  return [...text.matchAll(TERM)].map((found) => {
    const [term] = found;
    const head = HEAD.exec(term);
    const key = head && Object.hasOwn(KEYS, head[1].toLowerCase()) ? head[1].toLowerCase() : "body";
    const not = term.startsWith("-");
    const skipped = head && key === head[1].toLowerCase() ? head[0].length : Number(not);
    return { key, not, value: term.slice(skipped), from: found.index, to: found.index + term.length, valueAt: found.index + skipped };
  });
}

/** A filter for one tube, and for one of its states. */
export function filterOf(tube, state) {
  return [tube && `tube:${tube}`, state && `state:${state}`].filter(Boolean).join(" ");
}

const namesOf = (term) => (term.key === "state" ? term.value.toLowerCase() : term.value).split(",");

/** The filter, so that it selects only jobs in these states. */
export function within(filter, states) {
  const chosen = terms(filter).filter((term) => term.key === "state" && !term.not);
  const holds = states.length === STATES.length || chosen.some((term) => namesOf(term).every((state) => states.includes(state)));
  return holds ? filter : `${filter} state:${states.join(",")}`.trim();
}

/**
 * A filter as facets: the states it names, whether it has nothing else (alone) or one tube only (tube), and within(states),
 * the same filter with other states. Negated states belong to the rest.
 */
export function stateless(filter) {
  const all = terms(filter);
  const chosen = all.filter((term) => term.key === "state" && !term.not && namesOf(term).every((name) => STATES.includes(name)));
  const others = all.filter((term) => !chosen.includes(term));
  const [one] = others;
  const tube = others.length === 1 && one.key === "tube" && !one.not && !/[,*]/.test(one.value) ? one.value : null;
  const rest = others.map((term) => filter.slice(term.from, term.to)).join(" ");
  const states = chosen.length ? STATES.filter((state) => chosen.every((term) => namesOf(term).includes(state))) : [];
  return { states, tube, alone: !others.length || tube !== null, within: (next) => `${rest}${next.length ? ` state:${next.join(",")}` : ""}`.trim() };
}

/** A filter in words: {adjective, tube, rest}; tube is null when it is not exactly one. */
export function describe(filter) {
  const all = terms(filter);
  const tubes = all.filter((term) => term.key === "tube" && !term.not && !/[,*]/.test(term.value));
  const states = all.filter((term) => term.key === "state" && !term.not);
  const both = STATES.filter((state) => states.every((term) => namesOf(term).includes(state)));
  const told = [...(tubes.length === 1 ? tubes : []), ...states];
  const rest = all.filter((term) => !told.includes(term)).map((term) => filter.slice(term.from, term.to));
  return {
    tube: tubes.length === 1 ? tubes[0].value : null,
    adjective: states.length && both.length < 3 ? `${both.join(" or ")} ` : "",
    rest: rest.join(" "),
  };
}

/** Suggestions for the word at the caret: {from, to, items: [{text, says, open}]}. `tubes` are names to offer. */
export function suggest(text, caret, tubes = []) {
  const from = Math.max(...[...SPACE].map((space) => text.lastIndexOf(space, caret - 1))) + 1;
  let to = caret;
  while (to < text.length && !SPACE.includes(text[to])) to += 1;
  const minus = text[from] === "-" ? "-" : "";
  const word = text.slice(from + minus.length, caret);
  const found = /^([A-Za-z]+)(:|<=?|>=?)/.exec(word);
  const key = found?.[1].toLowerCase();
  let items = [];
  if (!found && KEYS[word.toLowerCase()]?.number) {
    items = KEYS[word.toLowerCase()].tries.map((one) => ({ text: minus + word + one, says: KEYS[word.toLowerCase()].says }));
  } else if (!found) {
    items = Object.entries(KEYS)
      .filter(([name]) => name.startsWith(word.toLowerCase()))
      .map(([name, about]) => ({ text: `${minus}${name}${about.number ? "" : ":"}`, says: about.says, open: true }));
  } else if (key === "tube" || key === "state") {
    const chosen = word.slice(key.length + 1).split(",");
    const last = chosen.pop();
    const before = `${minus}${key}:${chosen.map((one) => `${one},`).join("")}`;
    const written = last.toLowerCase();
    const names = key === "tube" ? tubes.filter((one) => one.toLowerCase().includes(written)) : STATES.filter((one) => one.startsWith(written));
    items = names.filter((name) => !chosen.includes(name)).map((name) => ({ text: before + name, says: "" }));
  } else if (KEYS[key]) {
    items = KEYS[key].tries.map((one) => ({ text: minus + key + one, says: KEYS[key].says })).filter((item) => item.text.startsWith(minus + word));
  }
  return { from, to, items: items.filter((item) => item.text !== text.slice(from, to)) };
}
