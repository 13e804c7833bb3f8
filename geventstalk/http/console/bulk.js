// The bulk changes of the server that are running: a line for each, on every page.
import { get, path, Problem, remove, session } from "./api.js";
import { say } from "./dialog.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, share, visible } from "./format.js";
import { isRunning, useEvent, useLive } from "./live.js";
import { jobsHref } from "./route.js";

const POLL_MS = 1000;

export function BulkChanges() {
  const [changes, setChanges] = useState([]);
  const timer = useRef(null);
  const { returned } = useLive();

  const ask = async () => {
    clearTimeout(timer.current);
    try {
      const { bulk } = await get("/bulk");
      const running = bulk.filter((work) => work.state === "running");
      setChanges(running);
      if (running.length) timer.current = setTimeout(() => isRunning() && ask(), POLL_MS);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem; // the page itself says that the server cannot be reached
    }
  };
  useEffect(() => {
    ask();
    addEventListener("work", ask);
    return () => {
      clearTimeout(timer.current);
      removeEventListener("work", ask);
    };
  }, [returned]);
  useEvent("bulk", ask);

  const stop = async (work) => {
    try {
      await remove(path`/bulk/${work.number}`);
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      say(`Stopping failed: ${problem.message}`, { fault: true });
    }
    ask();
  };
  if (!changes.length) return null;
  return html`<section class="bulk" aria-label="Work under way">${changes.map(
    (work) => html`<p key=${work.number}>
      <b title=${work.tube}>${work.action}${work.tube ? ` to ${work.tube}` : ""}</b> <a href=${jobsHref(work.filter)} title=${visible(work.filter)}><code>${visible(work.filter) || "all jobs"}</code></a>
      <span>by ${work.by}: ${share(work.searched, work.jobs_before)}, ${count(work.done)} done</span>
      <progress max=${Math.max(1, work.jobs_before)} value=${work.searched} aria-label="How far the work is"></progress>
      ${session.mayChange && html`<button type="button" class="small" onClick=${() => stop(work)}>Stop</button>`}
    </p>`,
  )}</section>`;
}
