// The page of an address. Filter and order of a table are in the address, so it can be shared.
import { useEffect, useState } from "./dom.js";

const watchers = new Set();

function read() {
  const [, page = "", ...rest] = location.pathname.split("/");
  let name = rest.join("/");
  try {
    name = decodeURIComponent(name);
  } catch {
    // No name has a lone %; the page will say that there is no such tube.
  }
  const query = new URLSearchParams(location.search);
  if (page === "tubes" && !name) name = query.get("name") ?? "";
  return { page, name, query };
}

function changed() {
  for (const watcher of watchers) watcher();
}

export const route = {
  start() {
    addEventListener("popstate", changed);
  },
};

/** Goes to an address of the console. */
export function navigate(to, { replace = false } = {}) {
  const here = location.pathname + location.search;
  if (to === here) return;
  const samePage = new URL(to, location.href).pathname === location.pathname;
  history[replace ? "replaceState" : "pushState"](null, "", to);
  changed();
  if (!samePage) {
    scrollTo(0, 0);
    document.getElementById("main")?.focus({ preventScroll: true });
  }
}

/** {page, name, query} of the address. */
export function useRoute() {
  const [, again] = useState(0);
  useEffect(() => {
    const watcher = () => again((n) => n + 1);
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  }, []);
  return read();
}

/** Some parameters of the address, and a function to change them. Default values are not written. */
export function useQuery(defaults) {
  const { query } = useRoute();
  const values = Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, query.get(name) ?? value]));
  const set = (changes, options = { replace: true }) => {
    const next = new URLSearchParams();
    for (const [name, value] of Object.entries({ ...values, ...changes })) {
      if (value !== defaults[name] && value !== null && value !== "") next.set(name, value);
    }
    const text = next.toString();
    navigate(location.pathname + (text ? `?${text}` : ""), options);
  };
  return [values, set];
}

/** The address of a tube, of a job, of the jobs of a filter, of a connection. */
export const tubeHref = (name) =>
  // A browser takes these two out of a path.
  name === "." || name === ".." ? `/tubes?name=${name}` : `/tubes/${encodeURIComponent(name)}`;
export const jobHref = (id) => `/jobs/${id}`;
export const jobsHref = (filter) => `/jobs?filter=${encodeURIComponent(filter)}`;
export const connectionsHref = (user) => `/connections?user=${encodeURIComponent(user)}`;
export const connectionHref = (number) => `/connections?number=${number}`;
