// The server's state, for the whole console: from one stream of events, or by a request every second while there is none.
// Nothing is requested while the tab is hidden or the reader has paused.
import { BASE, get, Problem, sit } from "./api.js";
import { useEffect, useRef, useState } from "./dom.js";

const POLL_MS = 1000;
const SILENCE_MS = 3000; // a stream brings figures every second, or every two from a server that has much to count
const PATIENCE_MS = 1000; // the least that a request may take, however late it was sent
const RETRY_MS = 5000;
const RETRY_MAX_MS = 60_000;
const ADDRESS_MAX = 6000; // a server takes a request line of 8 KiB

/** state: starting, live (by events), polling, lost, paused. */
export const live = { state: "starting", server: null, tubes: new Map(), at: 0, problem: null, returned: 0 };

const watchers = new Set();
const listeners = { audit: new Set(), bulk: new Set() };
const wanted = new Map(); // component -> names of tubes
let stream = null;
let streamNames = "";
let timer = null;
let retryMs = RETRY_MS;
let retryAt = 0;
let heardAt = 0; // when the stream opened, or when figures came last
let paused = false;

function changed() {
  for (const watcher of watchers) watcher();
}

function setState(state) {
  if (live.state === "lost" && state !== "lost") live.returned += 1;
  live.state = state;
  changed();
}

export const isRunning = () => !paused && !document.hidden;

function names() {
  const all = new Set();
  let length = 0;
  for (const list of wanted.values()) {
    for (const name of list) {
      length += all.has(name) ? 0 : encodeURIComponent(name).length + 3;
      if (length > ADDRESS_MAX || all.size === 200) return [...all];
      all.add(name);
    }
  }
  return [...all];
}

function take(figures) {
  live.server = figures.server;
  sit(figures.server);
  live.at = heardAt = Date.now();
  live.problem = null;
  if (figures.tubes) live.tubes = new Map(figures.tubes.map((tube) => [tube.name, tube]));
}

function open() {
  close();
  if (!isRunning()) return;
  const list = names();
  streamNames = list.join(",");
  const query = list.length ? `?tubes=${list.map(encodeURIComponent).join(",")}` : "";
  stream = new EventSource(`${BASE}/events${query}`);
  heardAt = Date.now();
  stream.addEventListener("figures", (event) => {
    retryMs = RETRY_MS;
    take(JSON.parse(event.data));
    setState("live");
  });
  for (const kind of ["audit", "bulk"]) {
    stream.addEventListener(kind, (event) => {
      const data = JSON.parse(event.data);
      for (const listener of listeners[kind]) listener(data);
    });
  }
  stream.onerror = fallBack;
}

function close() {
  if (stream) {
    stream.onerror = null;
    stream.close();
    stream = null;
  }
}

function fallBack() {
  close();
  retryAt = Date.now() + retryMs;
  retryMs = Math.min(retryMs * 2, RETRY_MAX_MS);
  clearTimeout(timer);
  timer = setTimeout(beat, 0);
}

const silence = () => new Problem(0, "No answer", `The server has not answered for ${SILENCE_MS / 1000} s.`);

/** Checks about once a second that the stream is alive. Without a stream, requests figures and at times reopens it. */
async function beat() {
  clearTimeout(timer);
  if (!isRunning()) return;
  const left = heardAt + SILENCE_MS - Date.now();
  if (stream) {
    if (left > 0) {
      timer = setTimeout(beat, left);
      return;
    }
    live.problem = silence();
    setState("lost");
    return fallBack();
  }
  const wasLost = live.state === "lost";
  try {
    const server = await get("/server", {}, undefined, wasLost ? SILENCE_MS : Math.max(PATIENCE_MS, left));
    if (!isRunning()) return;
    take({ server });
    setState("polling");
    if (wasLost) retryMs = RETRY_MS;
    if (wasLost || Date.now() >= retryAt) open();
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    live.problem = problem.title === "No answer" ? silence() : problem;
    if (isRunning()) setState(problem.status === 0 || problem.status >= 500 ? "lost" : "polling");
  }
  clearTimeout(timer);
  if (isRunning()) timer = setTimeout(beat, POLL_MS);
}

/** Begins. The first figures come from one request, which fails at once without a server. */
export function start() {
  document.addEventListener("visibilitychange", () => (isRunning() ? resume() : suspend()));
  resume();
}

function resume() {
  retryAt = 0;
  retryMs = RETRY_MS;
  changed();
  open();
  clearTimeout(timer);
  timer = setTimeout(beat, 1000);
  // The stream's first figures come a second later.
  get("/server").then(
    (server) => {
      if (!isRunning()) return;
      take({ server });
      setState(stream ? "live" : "polling");
    },
    () => {}, // beat() finds out why
  );
}

function suspend() {
  close();
  clearTimeout(timer);
  if (paused) setState("paused");
  else changed();
}

/** Stops refreshing, or goes on. */
export function togglePause() {
  paused = !paused;
  if (paused) {
    suspend();
  } else {
    setState("starting");
    resume();
  }
}

let reopening = null;

/** Adds these tubes to the stream. */
function watchTubes(who, list) {
  if (list.length) wanted.set(who, list);
  else wanted.delete(who);
  clearTimeout(reopening);
  reopening = setTimeout(() => {
    if (!stream) return;
    const brought = new Set(streamNames ? streamNames.split(",") : []);
    if (names().some((name) => !brought.has(name))) open();
  }, 300);
}

/** Returns the live state, with these tubes in it, and renders again when it changes. */
export function useLive(tubes = []) {
  const [, again] = useState(0);
  const who = useRef({}).current;
  const key = tubes.join(",");
  useEffect(() => {
    const watcher = () => again((n) => n + 1);
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  }, []);
  useEffect(() => {
    watchTubes(who, tubes);
    return () => watchTubes(who, []);
  }, [key]);
  return live;
}

/** Calls the listener for each event of the kind `audit` or `bulk`. */
export function useEvent(kind, listener) {
  const latest = useRef(listener);
  latest.current = listener;
  useEffect(() => {
    const call = (data) => latest.current(data);
    listeners[kind].add(call);
    return () => listeners[kind].delete(call);
  }, []);
}

/**
 * Loads data, and again after this many milliseconds while the page is seen (0: when `key` changes, or by reload()).
 * Old data stays while the next answer is on its way, and when it does not come.
 */
export function usePoll(key, load, everyMs) {
  const [state, setResult] = useState({ key: null, data: null, problem: null, at: 0 });
  const latest = useRef(load);
  latest.current = load;
  const again = useRef(() => {});
  useEffect(() => {
    let waiting = null;
    let control = null;
    let over = false;
    const run = async () => {
      clearTimeout(waiting);
      control?.abort();
      const mine = (control = new AbortController());
      try {
        const data = await latest.current(mine.signal);
        if (over || mine.signal.aborted) return;
        setResult({ key, data, problem: null, at: Date.now() });
      } catch (problem) {
        if (over || mine.signal.aborted) return;
        if (!(problem instanceof Problem)) throw problem;
        setResult((old) => ({ key, data: old.key === key ? old.data : null, problem, at: old.at }));
      }
      next();
    };
    const next = () => {
      clearTimeout(waiting);
      if (!over && everyMs && isRunning()) waiting = setTimeout(run, everyMs);
    };
    let was = live.returned;
    let wasRunning = isRunning();
    const watcher = () => {
      // After a lost connection, a pause or a hidden tab: load at once.
      if (live.returned !== was || (isRunning() && !wasRunning)) run();
      was = live.returned;
      wasRunning = isRunning();
    };
    watchers.add(watcher);
    again.current = run;
    run();
    return () => {
      over = true;
      clearTimeout(waiting);
      control?.abort();
      watchers.delete(watcher);
    };
  }, [key, everyMs]);
  const fresh = state.key === key ? state : { data: null, problem: null, at: 0 };
  return { ...fresh, loading: !fresh.data && !fresh.problem, reload: () => again.current() };
}
