// The grammar of filters, the same as the server's (filters.py), with the same sentences for what is wrong: both are
// tested on the examples of tests/data/filters.json. Pure. The server has the last word; this one colours, suggests, and
// says what is wrong before anybody has to ask. Positions count UTF-16 units, as an input field does.

export const STATES = ["ready", "delayed", "reserved", "buried"];
const CHARS_MAX = 2000;
const PATTERN_CHARS_MAX = 500;
const TERMS_MAX = 50;
const NAME_CHARS_MAX = 200;
const SHOWN_CHARS = 40;
const SPACE = " \t\r\n";
const U32_MAX = 4_294_967_295n;
const I64_MAX = 2n ** 63n - 1n;
const S = 1_000_000_000n;

const TIME = {
  units: { "": S, ms: S / 1000n, s: S, m: 60n * S, min: 60n * S, h: 3600n * S, d: 86_400n * S },
  most: U32_MAX * S,
  mostShown: `${U32_MAX}s`,
  wanted: "is no time; write 90s, 5min, 1.5h or 2d",
  decimals: true,
};
const SIZE = {
  units: { "": 1n, b: 1n, k: 1n << 10n, m: 1n << 20n, g: 1n << 30n },
  most: U32_MAX,
  mostShown: `${U32_MAX}`,
  wanted: "is no size; write 500, 10k, 1.5M or 1G",
  decimals: true,
};
const COUNT = { units: { "": 1n }, most: U32_MAX, mostShown: `${U32_MAX}`, wanted: "is no whole number", decimals: false };
const NUMBER = { ...COUNT, most: I64_MAX, mostShown: `${I64_MAX}` };

/** Every key: the kind of its numbers, what it means, values to begin with. */
export const KEYS = {
  tube: { says: "name of the tube; * stands for anything, several with commas", tries: [] },
  state: { says: "ready, reserved, delayed, buried; several with commas", tries: STATES },
  age: { number: TIME, says: "since the job was put", tries: [">1h", ">1d", "<5min", ":1h..2h"] },
  since: { number: TIME, says: "since the job came into its state", tries: [">1h", ">1d"] },
  body: { says: 'a word, "some words", or /a regular expression/', tries: [] },
  id: { number: NUMBER, says: "number of the job, or a range", tries: [":100..200"] },
  pri: { number: COUNT, says: "priority; 0 is the most urgent", tries: ["<1024"] },
  size: { number: SIZE, says: "bytes of the body", tries: [">1k", ">64k"] },
  ttr: { number: TIME, says: "time to run", tries: [">60s"] },
  delay: { number: TIME, says: "delay of the last put or release", tries: [">0s"] },
  reserves: { number: COUNT, says: "how often it was reserved", tries: [">3", ":0"] },
  timeouts: { number: COUNT, says: "how often its time ran out", tries: [">0"] },
  releases: { number: COUNT, says: "how often it was released", tries: [">0"] },
  buries: { number: COUNT, says: "how often it was buried", tries: [">0"] },
  kicks: { number: COUNT, says: "how often it was kicked", tries: [">0"] },
  holder: { number: NUMBER, says: "number of the connection that holds it", tries: [] },
};
const KNOWN = Object.keys(KEYS).sort();
const KEY = /([A-Za-z][A-Za-z0-9_-]*)(<=|>=|[:<>=])/y;
const LONELY = /^(?:[:=<>]|[<>]=|[<>]=?[0-9][^]*|:[A-Za-z0-9][^]*)$/;
const QUANTITY = /^([0-9]+)(?:\.([0-9]{1,3}))?([A-Za-z]*)$/;

class Wrong extends Error {
  constructor(text, at) {
    super(text);
    this.at = at;
  }
}

const shown = (text) => ([...text].length <= SHOWN_CHARS ? `"${text}"` : `"${[...text].slice(0, SHOWN_CHARS).join("")}..."`);

/**
 * {terms, wrong}: the terms up to the first fault, and the fault: {text, at}, or null.
 * A term: {key, not, from, to} and {any: [name]}, {any: [[least, most]]} (BigInt or null), {text}, or {pattern, ignoreCase}.
 */
export function parse(text) {
  const terms = [];
  try {
    const characters = [...text];
    if (characters.length > CHARS_MAX) {
      const at = characters.slice(0, CHARS_MAX).join("").length;
      throw new Wrong(`A filter has at most ${CHARS_MAX} characters; this one has ${characters.length}.`, at);
    }
    const half = /\p{Surrogate}/u.exec(text);
    if (half) throw new Wrong("Half of a character stands here.", half.index);
    new Reader(text).read(terms);
    return { terms, wrong: null };
  } catch (error) {
    if (!(error instanceof Wrong)) throw error;
    return { terms, wrong: { text: error.message, at: error.at } };
  }
}

/** Reads a filter from its beginning to its end; `at` is where it stands. */
class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  read(terms) {
    for (;;) {
      while (this.next() && SPACE.includes(this.next())) this.at += 1;
      if (!this.next()) return;
      if (terms.length === TERMS_MAX) throw new Wrong(`A filter has at most ${TERMS_MAX} terms.`, this.at);
      terms.push(this.term());
    }
  }

  next() {
    return this.text.charAt(this.at);
  }

  ends() {
    return !this.next() || SPACE.includes(this.next());
  }

  word() {
    const from = this.at;
    while (!this.ends()) this.at += 1;
    return this.text.slice(from, this.at);
  }

  term() {
    const from = this.at;
    const not = this.next() === "-";
    if (not) {
      this.at += 1;
      if (this.ends()) throw new Wrong("Nothing stands behind this -.", from);
      if (this.next() === "-") throw new Wrong("One - turns a term round; to look for two of them, put the text in quotes.", this.at);
    }
    const condition = this.condition();
    return { key: "body", ...condition, not, from, to: this.at };
  }

  condition() {
    const from = this.at;
    if (this.next() === '"') return { text: this.quotes() };
    KEY.lastIndex = from;
    const found = KEY.exec(this.text);
    if (found) {
      const key = found[1].toLowerCase();
      if (Object.hasOwn(KEYS, key)) {
        this.at = KEY.lastIndex;
        return { key, ...this.keyed(key, found[2], from) };
      }
      if (found[2] !== "=") throw new Wrong(`There is no ${shown(found[1])} to filter by, only ${KNOWN.join(", ")}. To look for text, put it in quotes.`, from);
    }
    const word = this.word();
    if (LONELY.test(word)) throw new Wrong("A term has no spaces in it; write age>1h.", from);
    if (word.length > 2 && word.startsWith("/") && (word.endsWith("/") || word.slice(1).toLowerCase().endsWith("/i"))) {
      throw new Wrong("Write body: before a regular expression. To look for a text that begins with /, put it in quotes.", from);
    }
    return { text: word };
  }

  keyed(key, sign, from) {
    if (sign === "=") throw new Wrong(`Write ${key}: for ${key}=. To look for this text, put it in quotes.`, this.at - 1);
    if (this.ends()) throw new Wrong(`Something is missing behind ${shown(this.text.slice(from, this.at))}.`, this.at);
    if (KEYS[key].number) return { any: this.ranges(key, sign) };
    if (sign !== ":") throw new Wrong(`Behind ${shown(key)} comes :, not ${sign}.`, this.at - sign.length);
    if (key === "state") return { any: this.list().map(([name, at]) => stateOf(name, at)) };
    if (key === "tube") return { any: this.list().map(([name, at]) => tubeOf(name, at)) };
    if (this.next() === '"') return { text: this.quotes() };
    if (this.next() === "/") return this.pattern();
    return { text: this.word() };
  }

  quotes() {
    const from = this.at;
    let found = "";
    this.at += 1;
    while (this.next() !== '"') {
      if (!this.next()) throw new Wrong("This quote is never closed.", from);
      if (this.next() === "\\" && ['"', "\\"].includes(this.text[this.at + 1])) this.at += 1;
      found += this.next();
      this.at += 1;
    }
    this.at += 1;
    if (!this.ends()) throw new Wrong("Put a space behind the closing quote.", this.at);
    if (!found) throw new Wrong("Nothing stands between these quotes.", from);
    return found;
  }

  pattern() {
    const from = this.at;
    this.at += 1;
    while (this.next() !== "/") {
      this.at += this.next() === "\\" ? 2 : 1;
      if (!this.next()) throw new Wrong("This regular expression is never closed; it ends with /.", from);
    }
    const pattern = this.text.slice(from + 1, this.at);
    if (!pattern) throw new Wrong("This regular expression is empty.", from);
    if ([...pattern].length > PATTERN_CHARS_MAX) throw new Wrong(`A regular expression has at most ${PATTERN_CHARS_MAX} characters.`, from);
    this.at += 1;
    const flagsAt = this.at;
    const flags = this.word();
    if (flags !== "" && flags !== "i") throw new Wrong("Behind the closing / comes i, or a space; write \\/ for a / within.", flagsAt);
    return { pattern, ignoreCase: flags === "i" };
  }

  /** What stands between the commas of the next word, and where. */
  list() {
    const found = [];
    let at = this.at;
    for (const item of this.word().split(",")) {
      if (!item) throw new Wrong("Something is missing beside this comma.", Math.min(at, this.at - 1));
      found.push([item, at]);
      at += item.length + 1;
    }
    return found;
  }

  ranges(key, sign) {
    const from = this.at;
    const items = this.list();
    if (sign === ":") return items.map(([item, at]) => rangeOf(key, item, at));
    if (items.length > 1) throw new Wrong(`A list comes behind :, not behind ${sign}.`, from - sign.length);
    const [[item]] = items;
    if (item.includes("..")) throw new Wrong(`A range comes behind :, not behind ${sign}.`, from - sign.length);
    const value = numberOf(key, item, from);
    if (sign === "<" && !value) throw new Wrong("Nothing is less than 0.", from);
    if (sign.startsWith("<")) return [[null, sign === "<=" ? value : value - 1n]];
    return [[sign === ">=" ? value : value + 1n, null]];
  }
}

function stateOf(name, at) {
  if (!STATES.includes(name.toLowerCase())) throw new Wrong(`There is no state ${shown(name)}, only ${STATES.join(", ")}.`, at);
  return name.toLowerCase();
}

function tubeOf(name, at) {
  if (name.startsWith("-")) throw new Wrong("A tube's name does not begin with -.", at);
  const other = /[^A-Za-z0-9+/;.$_()*-]/.exec(name);
  if (other) throw new Wrong("A tube's name does not have this character.", at + other.index);
  if (name.length > NAME_CHARS_MAX) throw new Wrong(`A tube's name has at most ${NAME_CHARS_MAX} characters.`, at);
  return name;
}

function rangeOf(key, item, at) {
  const dots = item.indexOf("..");
  if (dots < 0) {
    if (key === "age" || key === "since") {
      throw new Wrong(`No job meets a time exactly; write ${key}>1h, ${key}<1h or ${key}:1h..2h.`, at);
    }
    const value = numberOf(key, item, at);
    return [value, value];
  }
  const [left, right] = [item.slice(0, dots), item.slice(dots + 2)];
  if (!left && !right) throw new Wrong("A range has an end; write 100..200, 100.. or ..200.", at);
  const least = left ? numberOf(key, left, at) : null;
  const most = right ? numberOf(key, right, at + dots + 2) : null;
  if (least !== null && most !== null) {
    const hasUnit = (text) => /[A-Za-z]$/.test(text);
    if (KEYS[key].number.decimals && least && hasUnit(left) !== hasUnit(right)) throw new Wrong("Write a unit at both ends of the range, or at none.", at);
    if (least > most) throw new Wrong(`${shown(item)} holds nothing: the smaller end comes first.`, at);
  }
  return [least, most];
}

function numberOf(key, written, at) {
  const kind = KEYS[key].number;
  const found = QUANTITY.exec(written);
  const unit = found && Object.hasOwn(kind.units, found[3].toLowerCase()) ? kind.units[found[3].toLowerCase()] : null;
  if (unit === null || (found[2] !== undefined && !kind.decimals)) throw new Wrong(`${shown(written)} ${kind.wanted}.`, at);
  const thousandths = (BigInt(found[1]) * 1000n + BigInt((found[2] ?? "").padEnd(3, "0"))) * unit;
  if (thousandths % 1000n) throw new Wrong(`${shown(written)} ${kind.wanted}.`, at);
  if (thousandths / 1000n > kind.most) throw new Wrong(`${shown(written)} is too large; the most is ${kind.mostShown}.`, at);
  return thousandths / 1000n;
}

/** A filter for one tube, and for one of its states. */
export function filterOf(tube, state) {
  return [tube && `tube:${tube}`, state && `state:${state}`].filter(Boolean).join(" ");
}

/** The filter, so that it selects only jobs in these states. */
export function within(filter, states) {
  const chosen = parse(filter).terms.filter((term) => term.key === "state" && !term.not);
  const holds = states.length === STATES.length || chosen.some((term) => term.any.every((state) => states.includes(state)));
  return holds ? filter : `${filter} state:${states.join(",")}`.trim();
}

/** What a filter selects, in words: {adjective, tube, rest}; tube is null when it is not exactly one. */
export function describe(filter) {
  const { terms } = parse(filter);
  const tubes = terms.filter((term) => term.key === "tube" && !term.not && term.any.length === 1 && !term.any[0].includes("*"));
  const states = terms.filter((term) => term.key === "state" && !term.not);
  const both = STATES.filter((state) => states.every((term) => term.any.includes(state)));
  const told = [...(tubes.length === 1 ? tubes : []), ...states];
  const rest = terms.filter((term) => !told.includes(term)).map((term) => filter.slice(term.from, term.to));
  return {
    tube: tubes.length === 1 ? tubes[0].any[0] : null,
    adjective: states.length && both.length < 3 ? `${both.join(" or ")} ` : "",
    rest: rest.join(" "),
  };
}

/** What may stand where the reader types: {from, to, items: [{text, says, open}]}. `tubes` are names to offer. */
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
