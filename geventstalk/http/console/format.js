// Numbers, bytes, ages and times for people. Pure: knows no page and no clock but its argument.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const HUNDREDTH = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NONE = "–";

/** A count: 1,204. */
export function count(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(value);
}

/** A count and its noun: "1 job", "1,204 jobs". */
export function counted(value, noun, nouns = noun + "s") {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

/** A short number, as at an axis: 0.25, 12.5, 1,204, 12.4k, 3.1M. */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 10_000) return (size < 1 ? HUNDREDTH : size < 100 ? TENTH : WHOLE).format(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return (size >= 100 * unit ? WHOLE : TENTH).format(value / unit) + letter;
  }
  return WHOLE.format(value);
}

/** A rate a second: 0, 0.03, 1.5, 240. */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 0.005) return "0";
  return (size < 1 ? HUNDREDTH : size < 100 ? TENTH : WHOLE).format(value);
}

/** A rate with its sign, for growth: +1.5, −0.2, 0. */
export function signed(value) {
  if (value === null || value === undefined) return NONE;
  const text = rate(Math.abs(value));
  return text === "0" ? "0" : (value > 0 ? "+" : "−") + text;
}

/** Bytes: 812 bytes, 1.4 MiB. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  if (unit === 0) return counted(size, "byte");
  return `${(Math.abs(size) < 100 ? TENTH : WHOLE).format(size)} ${UNITS[unit]}`;
}

/** A span of time in its two largest units: 320 ms, 4.2 s, 12 min 5 s, 3 h 12 min, 2 d 4 h. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.01) return `${TENTH.format(seconds * 1000)} ms`;
  if (seconds < 0.9995) return `${WHOLE.format(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${TENTH.format(seconds)} s`;
  if (seconds < 59.5) return `${WHOLE.format(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(seconds / 60);
  if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(seconds / 3600);
  if (hours < 100 * 24) return pair(Math.floor(hours / 24), "d", hours % 24, "h");
  return `${WHOLE.format(hours / 24)} d`;
}

function pair(large, unit, small, smaller) {
  return small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

/** A span of time exactly: 11,534.250 s. */
export function exactly(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const digits = new Intl.NumberFormat("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
  return `${digits.format(seconds)} s`;
}

const two = (value) => String(value).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** The time of day: 14:03:22. */
export function clock(unix, withSeconds = true) {
  const at = new Date(unix * 1000);
  const minutes = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return withSeconds ? `${minutes}:${two(at.getSeconds())}` : minutes;
}

/** A time: the time of day, with the date when it is not the date of `now`. */
export function moment(unix, now = Date.now() / 1000) {
  if (unix === null || unix === undefined) return NONE;
  const at = new Date(unix * 1000);
  const today = new Date(now * 1000);
  if (at.toDateString() === today.toDateString()) return clock(unix);
  const year = at.getFullYear() === today.getFullYear() ? "" : ` ${at.getFullYear()}`;
  return `${at.getDate()} ${MONTHS[at.getMonth()]}${year} ${clock(unix)}`;
}

/** A time exactly, with the difference to UTC: 2026-11-22 14:03:22.120 +01:00. */
export function exactMoment(unix) {
  if (unix === null || unix === undefined) return "";
  const at = new Date(unix * 1000);
  const offset = -at.getTimezoneOffset();
  const zone = `${offset < 0 ? "−" : "+"}${two(Math.floor(Math.abs(offset) / 60))}:${two(Math.abs(offset) % 60)}`;
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${date} ${clock(unix)}.${String(at.getMilliseconds()).padStart(3, "0")} ${zone}`;
}

// Characters that are not seen, or change the direction of those beside them. The joiners are part of some scripts and of
// emoji, so they are seen beside such characters.
const HIDDEN = /([\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]|(?<=^|[\0-\u024f])[\u200c\u200d])/u;
const EVERY_HIDDEN = new RegExp(HIDDEN, "gu");

const escaped = (character) => {
  const code = character.codePointAt(0).toString(16);
  return code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
};

/** A text with escapes for what is hidden in it. */
export const visible = (text) => text.replace(EVERY_HIDDEN, escaped);

/** The pieces of a text; every second one is the escape of a hidden character. */
export const pieces = (text) => text.split(HIDDEN).map((piece, at) => (at % 2 ? escaped(piece) : piece));

/** A part of a whole: 12 %, 0.4 %. */
export function share(part, whole) {
  if (!whole) return NONE;
  const percent = (100 * part) / whole;
  return `${(percent > 0 && percent < 10 ? TENTH : WHOLE).format(percent)} %`;
}
