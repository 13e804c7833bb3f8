// The client of /api/v1. The only module that sends requests; the stream of events is opened in live.js.

export const BASE = "/api/v1";
const LIMIT_MS = 30_000;

/** The server's refusal of a request (status > 0), or a failure on the way to it (status 0). */
export class Problem extends Error {
  constructor(status, title, detail, at) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.detail = detail;
    this.at = at; // of a filter: the place of the fault, in code points
  }
}

/** The user, and the server's name. Until the server has answered, the user has the role read. */
export const session = { role: "read", name: "", csrf: null, mayChange: false, mayOperate: false, node: null, users: false, sees_all: true, rights: null, place: "", colour: null, ends: false };

/** A path of the API; each value is one segment, with any characters. */
export function path(strings, ...values) {
  return strings.reduce((whole, piece, at) => whole + encodeURIComponent(values[at - 1]) + piece);
}

/** The path of a tube. A browser takes `.` and `..` out of a path, and a proxy perhaps more. */
export const tubePath = (name) => `/tube?${new URLSearchParams({ name })}`;

/** The path and its parameters; those that are null, undefined, "" or false are left out. */
export function address(where, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    if (Array.isArray(value)) {
      if (value.length) query.set(name, value.join(","));
    } else {
      query.set(name, String(value));
    }
  }
  const text = query.toString();
  return BASE + where + (text ? `?${text}` : "");
}

/** Sends a request; returns the answer, or null for an empty answer. Raises Problem. */
async function call(method, where, { params, body, signal, limitMs = LIMIT_MS } = {}) {
  const headers = { Accept: "application/json", "X-Geventstalk-Via": "console" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET" && session.csrf) headers["X-CSRF-Token"] = session.csrf;
  const timeout = AbortSignal.timeout(limitMs);
  let answer;
  let text;
  try {
    answer = await fetch(address(where, params), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
      signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
    });
    text = await answer.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    if (timeout.aborted) throw new Problem(0, "No answer", `The server has not answered within ${limitMs / 1000} s.`);
    throw new Problem(0, "No connection", "The server cannot be reached.");
  }
  if (answer.ok) return text ? JSON.parse(text) : null;
  if (answer.status === 401 && !session.ends) logIn();
  let said = {};
  try {
    said = JSON.parse(text);
  } catch {
    // The answer may be a proxy's: its status must do.
  }
  throw new Problem(answer.status, said.title || `Status ${answer.status}`, said.detail, said.at);
}

export const get = (where, params, signal, limitMs) => call("GET", where, { params, signal, limitMs });
export const post = (where, body) => call("POST", where, { body });
export const put = (where, body) => call("PUT", where, { body });
export const patch = (where, body) => call("PATCH", where, { body });
export const remove = (where) => call("DELETE", where);

/** Requests the user's name and role. */
export async function whoAmI() {
  const [said, server] = await Promise.all([get("/session"), get("/server").catch(() => null)]);
  Object.assign(session, said);
  sit(server);
  return session;
}

/** Takes the server's name, and the node's role: no user changes anything at a standby. */
export function sit(server) {
  session.place = server?.name ?? session.place;
  session.colour = server ? server.name_color : session.colour;
  session.node = server?.node ?? null;
  const changes = session.role === "admin" || Object.values(session.rights ?? {}).some((words) => words.includes("put") || words.includes("manage"));
  session.mayChange = changes && session.node?.serves !== false;
  session.mayOperate = session.role === "admin" && session.mayChange;
}

/** Leaves for the login page, which comes back here. A logout leaves for a login page that does not. */
function logIn() {
  const here = location.pathname + location.search;
  location.assign(`/login?next=${encodeURIComponent(here)}`);
}
