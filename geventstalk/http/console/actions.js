// The operator's actions: each asks before harm, works through the API, says what it did, and offers an undo where one
// is possible. Pages call these and load again.
import { get, patch, path, post, Problem, remove, tubePath } from "./api.js";
import { ask, say, work } from "./dialog.js";
import { html } from "./dom.js";
import { describe, filterOf, within } from "./filter.js";
import { age, count, counted } from "./format.js";

const TYPED_FROM = 100; // with this many jobs the operator types the tube's name, or the number
const U32_MAX = 4_294_967_295;
const AT_ONCE = 4;
const TUBE = /^[A-Za-z0-9+/;.$_()][A-Za-z0-9+/;.$_()-]{0,199}$/;

const VERBS = {
  delete: { now: "Delete", done: "Deleted", doing: "Deleting", danger: true },
  kick: { now: "Kick", done: "Kicked", doing: "Kicking" },
  bury: { now: "Bury", done: "Buried", doing: "Burying" },
  release: { now: "Release", done: "Released", doing: "Releasing" },
  move: { now: "Move", done: "Moved", doing: "Moving" },
  change: { now: "Change", done: "Changed", doing: "Changing" },
};

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Runs the work; a Problem becomes a note. Returns whether it went well. */
export async function attempt(what, run) {
  try {
    await run();
    return true;
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    say(`${what} failed: ${problem.message}`, { fault: true });
    return false;
  }
}

const tubeFault = (name) =>
  TUBE.test(name) ? null : name ? "A tube's name has up to 200 of the characters A-Z a-z 0-9 + / ; . $ _ ( ) -, and does not begin with -." : "A name is missing.";

/** Returns a whole number from the form, or null. */
function whole(text, most = U32_MAX) {
  const clean = String(text).replaceAll(",", "").trim();
  if (!/^\d+$/.test(clean)) return null;
  const value = Number(clean);
  return value <= most ? value : null;
}

const numberFault = (values, names) => {
  for (const [name, label] of names) {
    if (values[name] !== "" && whole(values[name]) === null) return `${label} is a whole number from 0 to ${count(U32_MAX)}.`;
  }
  return null;
};

// Tubes

export async function pauseTube(tube, after) {
  const said = await ask({
    title: `Pause ${tube.name}?`,
    text: "Workers get no job of this tube until the time is over. Puts go on.",
    fields: [{ name: "s", label: "For", kind: "select", value: "3600", options: PAUSES, autofocus: true }],
    button: "Pause the tube",
  });
  if (said) await setPause(tube, Number(said.s), after);
}

const PAUSES = [["60", "1 minute"], ["600", "10 minutes"], ["3600", "1 hour"], ["14400", "4 hours"], ["86400", "1 day"], ["604800", "1 week"]];

/** Pauses for some seconds, or ends a pause with 0; the undo is the state before. */
export async function setPause(tube, seconds, after, undo = true) {
  const left = Math.ceil(tube.pause_left_s || 0);
  const done = await attempt(seconds ? "The pause" : "Ending the pause", () => patch(tubePath(tube.name), { pause_s: seconds }));
  if (done) {
    const text = seconds ? `Paused ${tube.name} for ${age(seconds)}.` : `${tube.name} goes on.`;
    const back = { text: "Undo", run: () => setPause({ ...tube, pause_left_s: seconds }, left, after, false) };
    say(text, { undo: undo ? back : null });
  }
  after?.();
}

/** Kicks this many buried jobs. */
export async function kickTube(tube, after) {
  const most = tube.jobs.buried;
  const said = await ask({
    title: `Kick buried jobs of ${tube.name}`,
    text: `${counted(most, "job is", "jobs are")} buried. Kicked jobs become ready, the oldest first.`,
    fields: [{ name: "n", label: "How many", kind: "number", value: String(most), min: 1, max: most, autofocus: true }],
    check: ({ n }) => (whole(n, most) ? null : `A whole number from 1 to ${count(most)}.`),
    button: ({ n }) => `Kick ${counted(whole(n, most) ?? 0, "job")}`,
  });
  if (!said) return;
  const n = whole(said.n, most);
  await bulk({ filter: filterOf(tube.name, "buried"), action: "kick", limit: n < most ? n : undefined, asked: true }, after);
}

/** Deletes all jobs of a state. */
export function flushTube(tube, state, after) {
  return bulk({ filter: filterOf(tube.name, state), action: "delete" }, after);
}

/** Moves all jobs of a tube, or those of a state, to another tube. */
export function moveTube(tube, state, after) {
  return bulk({ filter: filterOf(tube.name, state), action: "move" }, after);
}

/** Does something to many tubes, one after the other. */
async function eachTube(names, { title, run, said }, after) {
  let done = 0;
  const faults = [];
  const begun = performance.now();
  await work({
    title,
    run: async (update, isCancelled) => {
      for (const name of names) {
        if (isCancelled()) break;
        update({ done, of: names.length, text: `${count(done)} of ${counted(names.length, "tube")}` });
        try {
          await run(name);
          done += 1;
        } catch (problem) {
          if (!(problem instanceof Problem)) throw problem;
          faults.push(`${name}: ${problem.message}`);
          if (problem.status === 0) break;
        }
      }
    },
  });
  if (done || !faults.length) say(`${said} ${counted(done, "tube")} in ${age((performance.now() - begun) / 1000)}.`);
  if (faults.length) say(`${counted(faults.length, "tube")} failed. ${faults[0]}`, { fault: true });
  after?.();
}

export async function pauseTubes(names, after) {
  const said = await ask({
    title: `Pause ${counted(names.length, "tube")}?`,
    text: "Workers get no job of these tubes until the time is over. Puts go on.",
    fields: [{ name: "s", label: "For", kind: "select", value: "3600", options: [["0", "end the pause"], ...PAUSES], autofocus: true }],
    typed: names.length >= TYPED_FROM ? String(names.length) : null,
    button: (values) => `${values.s === "0" ? "Resume" : "Pause"} ${counted(names.length, "tube")}`,
  });
  if (!said) return;
  const seconds = Number(said.s);
  const [title, word] = seconds ? ["Pausing tubes", "Paused"] : ["Resuming tubes", "Resumed"];
  await eachTube(names, { title, said: word, run: (name) => patch(tubePath(name), { pause_s: seconds }) }, after);
}

/** Kicks or flushes many tubes: counts, asks once, then works tube by tube. */
export async function bulkTubes(tubes, { action, state }, after) {
  const jobs = tubes.reduce((sum, tube) => sum + tube.jobs[state], 0);
  const some = tubes.filter((tube) => tube.jobs[state] > 0);
  const verb = VERBS[action];
  const what = `${counted(jobs, `${state} job`)} of ${counted(some.length, "tube")}`;
  if (!jobs) return say(`None of these tubes has a ${state} job.`);
  const said = await ask({
    title: `${verb.now} ${what}?`,
    text: joined(
      partsOf({ parts: some.map((tube) => ({ tube: tube.name, state, count: tube.jobs[state] })).sort((one, other) => other.count - one.count), parts_total: some.length }),
      action === "delete" ? "Deleted jobs are gone for good." : "Kicked jobs become ready.",
    ),
    danger: verb.danger,
    typed: jobs >= TYPED_FROM ? String(jobs) : null,
    button: `${verb.now} ${counted(jobs, "job")}`,
  });
  if (!said) return;
  const run = async (name) => {
    const end = await finished(await post("/bulk", { filter: filterOf(name, state), action }), () => {}, () => false);
    if (end.state === "failed") throw new Problem(500, "Failed", end.error);
  };
  await eachTube(some.map((tube) => tube.name), { title: `${verb.doing} ${state} jobs`, said: `${verb.done} the ${state} jobs of`, run }, after);
}

// Many jobs

/** Returns the jobs of a filter as a noun: "1,204 buried jobs of mail that match age>1h". */
function phrase(number, filter) {
  const { adjective, tube, rest } = describe(filter);
  const jobs = counted(number, `${adjective}job`);
  return `${jobs}${tube ? ` of ${tube}` : adjective || rest ? "" : " of all tubes"}${rest ? ` that match ${rest}` : ""}`;
}

/** Waits for the end of a bulk change; shows its progress. */
async function finished(state, update, isCancelled) {
  let asked = false;
  dispatchEvent(new Event("work")); // bulk.js shows it
  while (state.state === "running") {
    if (isCancelled() && !asked) {
      asked = true;
      state = await remove(path`/bulk/${state.number}`);
      continue;
    }
    update({ done: state.searched, of: state.jobs_before, text: `${counted(state.done, "job")} so far` });
    await pause(200);
    state = await get(path`/bulk/${state.number}`);
  }
  return state;
}

/** Changes all jobs that match a filter: counts, asks with the number, works, says what was done. */
export async function bulk({ filter: wide, action, limit, changes, asked = false }, after) {
  const verb = VERBS[action];
  const filter = within(wide, FITS[action]); // so that the number in the question is right
  await attempt(verb.now, async () => {
    const request = { filter, action, ...changes };
    if (limit) request.limit = limit;
    if (action === "move") request.tube = "default";
    if (action === "change" && !changes) request.pri = 0;
    const counting = await work({ title: "Counting jobs", run: () => post("/bulk", { ...request, dry_run: true }) });
    const number = Math.max(0, counting.matched - counting.failed);
    if (!number) {
      const nothing = phrase(0, filter).replace(/^0 /, "no ");
      return say(`There are ${nothing}.`);
    }
    if (!asked || number >= TYPED_FROM) {
      const said = await ask(questionOf({ action, number, filter, changes, parts: partsOf(counting) }));
      if (!said) return;
      if (action === "move") request.tube = said.tube;
      if (action === "change" && !changes) {
        delete request.pri;
        for (const [name, key] of CHANGES) if (said[name] !== "") request[key] = whole(said[name]);
      }
    }
    const end = await work({
      title: `${verb.doing} ${counted(number, "job")}`,
      away: true,
      run: async (update, isCancelled) => finished(await post("/bulk", request), update, isCancelled),
    });
    const rest = end.failed ? ` ${counted(end.failed, "job")} that matched could not be and ${end.failed === 1 ? "was" : "were"} left alone.` : "";
    const where = action === "move" ? ` to ${request.tube}` : "";
    if (end.state === "failed") say(`${verb.done} ${counted(end.done, "job")}${where}, then it failed: ${end.error}`, { fault: true });
    else if (end.state === "cancelled") say(`Stopped. ${verb.done} ${counted(end.done, "job")}${where} until then.`);
    else say(`${verb.done} ${counted(end.done, "job")}${where} in ${age(end.took_s)}.${rest}`);
  });
  after?.();
}

const CHANGES = [["pri", "pri"], ["delay", "delay_s"], ["ttr", "ttr_s"]];

const PARTS_SHOWN = 5;

/** The jobs of a count by tube and state: "1,204 buried of mail, 3 ready of orders, and more of 2 other tubes or states". */
function partsOf({ parts, parts_total: total }) {
  if (total < 2) return "";
  const shown = parts.slice(0, PARTS_SHOWN).map((part) => `${count(part.count)} ${part.state} of ${part.tube}`);
  const more = total - shown.length;
  return `They are ${shown.join(", ")}${more ? `, and others of ${counted(more, "more tube or state", "more tubes or states")}` : ""}.`;
}

function questionOf({ action, number, filter, changes, parts }) {
  const verb = VERBS[action];
  const { tube } = describe(filter);
  const typed = number >= TYPED_FROM ? (tube ?? String(number)) : null;
  const common = { title: `${verb.now} ${phrase(number, filter)}?`, danger: verb.danger, typed };
  const button = `${verb.now} ${counted(number, "job")}`;
  if (action === "move") {
    return {
      ...common,
      text: joined(parts, "The jobs keep their ids, priorities and states."),
      fields: [{ name: "tube", label: "To the tube", autofocus: true }],
      check: (values) => tubeFault(values.tube) ?? (values.tube === tube ? "The jobs are in this tube." : null),
      button,
    };
  }
  if (action === "change" && !changes) {
    const form = changeForm();
    return { ...common, ...form, text: joined(parts, form.text), button };
  }
  const texts = {
    delete: "Deleted jobs are gone for good. Jobs that are put after this begins are not touched.",
    kick: "Buried and delayed jobs become ready.",
    bury: "No worker gets a buried job before it is kicked.",
    release: "Workers that hold such a job lose the job, and another worker may get it.",
  };
  return { ...common, text: joined(parts, texts[action]), button };
}

const joined = (...sentences) => sentences.filter(Boolean).join(" ");

function changeForm(job) {
  return {
    text: job?.state === "reserved" ? "A reserved job takes a new ttr only." : "What is left empty stays as it is.",
    fields: [
      { name: "pri", third: true, label: "Priority", kind: "text", value: job ? String(job.pri) : "", hint: "0 is the most urgent", autofocus: true },
      { name: "delay", third: true, label: "Delay from now", kind: "text", unit: "s", hint: "makes a ready job delayed" },
      { name: "ttr", third: true, label: "Time to run", kind: "text", unit: "s", value: job ? String(job.ttr_s) : "" },
    ],
    check: (values) => numberFault(values, [["pri", "The priority"], ["delay", "The delay"], ["ttr", "The time to run"]]) ?? (CHANGES.every(([name]) => values[name] === "") ? "Nothing is to be changed." : null),
  };
}

// Selected jobs

const alone = {
  delete: (job) => remove(path`/jobs/${job.id}`),
  kick: (job) => post(path`/jobs/${job.id}/kick`),
  bury: (job) => post(path`/jobs/${job.id}/bury`),
  release: (job) => post(path`/jobs/${job.id}/release`),
};

const FITS = {
  kick: ["buried", "delayed"],
  bury: ["ready", "delayed", "reserved"],
  release: ["reserved"],
  delete: ["ready", "reserved", "delayed", "buried"],
  move: ["ready", "delayed", "buried"],
  change: ["ready", "reserved", "delayed", "buried"],
};
export const fits = (action, job) => FITS[action].includes(job.state);

/** Returns whether a worker holds one of these jobs. */
const takes = (jobs) => jobs.some((job) => job.state === "reserved");

/** Returns whether to ask first: where something is lost, where a worker loses its job, and for several jobs. */
export const asks = (action, jobs) => action === "delete" || action === "release" || (action === "bury" && takes(jobs)) || jobs.length > 1;

/** Changes one job, or some; asks before harm. Calls after() with whether anything was done. */
export async function some(jobs, action, after) {
  const verb = VERBS[action];
  const right = jobs.filter((job) => fits(action, job));
  if (!right.length) return say(`None of these jobs is in a state to ${action}.`);
  const tubes = new Set(right.map((job) => job.tube));
  const tube = tubes.size === 1 ? right[0].tube : null;
  const where = tube ? ` of ${tube}` : ` of ${counted(tubes.size, "tube")}`;
  const what = right.length === 1 ? `job ${right[0].id}` : counted(right.length, "job");
  let run = alone[action];
  let undo = null;
  let to = "";
  if (action === "move") {
    const said = await ask({
      title: `Move ${what}${where}`,
      fields: [{ name: "tube", label: "To the tube", autofocus: true }],
      check: (values) => tubeFault(values.tube) ?? (values.tube === tube ? "The job is in this tube." : null),
      button: `Move ${what}`,
    });
    if (!said) return;
    to = ` to ${said.tube}`;
    run = (job) => patch(path`/jobs/${job.id}`, { tube: said.tube });
    undo = { text: "Move back", action: (job) => patch(path`/jobs/${job.id}`, { tube: job.tube }), done: "Moved back" };
  } else if (action === "change") {
    const one = right.length === 1 ? right[0] : null;
    const said = await ask({ title: `Change ${what}${where}`, ...changeForm(one), button: `Change ${what}` });
    if (!said) return;
    const changes = {};
    for (const [name, key] of CHANGES) {
      if (said[name] !== "" && !(one && name !== "delay" && whole(said[name]) === one[key])) changes[key] = whole(said[name]);
    }
    if (!Object.keys(changes).length) return say("Nothing was changed: these are the values that it has.");
    run = (job) => patch(path`/jobs/${job.id}`, changes);
    if (!("delay_s" in changes)) {
      const old = (job) => Object.fromEntries(Object.keys(changes).map((key) => [key, job[key]]));
      undo = { text: "Undo", action: (job) => patch(path`/jobs/${job.id}`, old(job)), done: "Changed back" };
    }
  } else if (asks(action, right)) {
    const texts = {
      delete: "What is deleted is gone for good.",
      release: "The worker that holds the job loses the job, and another worker may get it.",
      kick: "They become ready.",
      bury: `${takes(right) ? "The worker that holds the job loses the job. " : ""}No worker gets a buried job before it is kicked.`,
    };
    const said = await ask({
      title: `${verb.now} ${what}${where}?`,
      text: joined(partsOf(tally(right)), texts[action]),
      danger: verb.danger,
      typed: right.length >= TYPED_FROM ? (tube ?? String(right.length)) : null,
      button: `${verb.now} ${what}`,
    });
    if (!said) return;
  }
  if (action === "bury" && right.every((job) => job.state === "ready")) undo = { text: "Undo", action: alone.kick, done: "Kicked" };
  if (action === "kick" && right.every((job) => job.state === "buried")) undo = { text: "Undo", action: alone.bury, done: "Buried" };
  const done = await each(right, run, `${verb.doing} ${what}`);
  const left = jobs.length - right.length;
  if (done.good.length) {
    const named = done.good.length === 1 ? `job ${done.good[0].id}` : counted(done.good.length, "job");
    const back = undo && {
      text: undo.text,
      run: async () => {
        const again = await each(done.good, undo.action, undo.text);
        if (again.good.length) say(`${undo.done}: ${again.good.length === 1 ? `job ${again.good[0].id}` : counted(again.good.length, "job")}.`);
        after?.(true);
      },
    };
    say(`${verb.done} ${named}${to}.${left ? ` ${counted(left, "job")} in another state ${left === 1 ? "was" : "were"} left alone.` : ""}`, { undo: back });
  }
  after?.(done.good.length > 0);
}

/** Jobs, counted by tube and state as the server counts them. */
function tally(jobs) {
  const counts = new Map();
  for (const { tube, state } of jobs) {
    const key = `${state} ${tube}`;
    counts.set(key, { tube, state, count: (counts.get(key)?.count ?? 0) + 1 });
  }
  return { parts: [...counts.values()].sort((one, other) => other.count - one.count), parts_total: counts.size };
}

async function each(jobs, run, title) {
  const good = [];
  const faults = [];
  await work({
    title,
    run: async (update, isCancelled) => {
      const left = jobs.slice();
      const lane = async () => {
        while (left.length && !isCancelled()) {
          const job = left.shift();
          try {
            await run(job);
            good.push(job);
          } catch (problem) {
            if (!(problem instanceof Problem)) throw problem;
            faults.push(`Job ${job.id}: ${problem.message}`);
          }
          update({ done: good.length + faults.length, of: jobs.length, text: `${count(good.length)} of ${counted(jobs.length, "job")}` });
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, lane));
    },
  });
  if (faults.length) say(faults.length === 1 ? faults[0] : `${counted(faults.length, "job")} failed. ${faults[0]}`, { fault: true });
  return { good, faults };
}

/** Puts a job; the form begins with the given values, such as those of a job to copy. */
export async function putJob({ tube = "default", body = "", base64 = null, pri = 65_536, delay_s = 0, ttr_s = 60 } = {}, after) {
  const said = await ask({
    title: base64 === null ? "Put a job" : "Put a copy",
    wide: true,
    text: base64 === null ? null : "The body is not text. The copy has the same bytes.",
    fields: [
      { name: "tube", label: "Tube", value: tube },
      base64 === null && { name: "body", label: "Body", kind: "area", value: body, autofocus: true },
      { name: "pri", third: true, label: "Priority", value: String(pri), hint: "0 is the most urgent" },
      { name: "delay", third: true, label: "Delay", value: String(delay_s), unit: "s" },
      { name: "ttr", third: true, label: "Time to run", value: String(ttr_s), unit: "s" },
    ].filter(Boolean),
    check: (values) => tubeFault(values.tube) ?? numberFault(values, [["pri", "The priority"], ["delay", "The delay"], ["ttr", "The time to run"]]),
    button: "Put the job",
  });
  if (!said) return;
  await attempt("The put", async () => {
    const request = { tube: said.tube, pri: whole(said.pri) ?? 65_536, delay_s: whole(said.delay) ?? 0, ttr_s: whole(said.ttr) ?? 60 };
    if (base64 === null) request.body = said.body;
    else request.body_base64 = base64;
    const job = await post("/jobs", request);
    say(html`Put <a href="/jobs/${job.id}">job ${job.id}</a> into ${job.tube}.`);
    after?.(job);
  });
}

// Connections and the server

export async function closeConnection(connection, after) {
  const holds = connection.reserved;
  const said = await ask({
    title: `Close connection ${connection.number}?`,
    text: `${connection.address}. ${holds ? `The ${counted(holds, "job")} that it holds ${holds === 1 ? "becomes" : "become"} ready again.` : "It holds no job."} A client may connect again.`,
    danger: true,
    button: `Close connection ${connection.number}`,
  });
  if (!said) return;
  await attempt("Closing", async () => {
    await remove(path`/connections/${connection.number}`);
    say(`Closed connection ${connection.number}.`);
  });
  after?.();
}

export async function drain(on, after) {
  if (on) {
    const said = await ask({
      title: "Drain the server?",
      text: "Every put is refused until draining ends. All other commands go on.",
      danger: true,
      button: "Drain the server",
    });
    if (!said) return;
  }
  const done = await attempt(on ? "Draining" : "Ending draining", () => patch("/server", { draining: on }));
  if (done) say(on ? "The server drains: puts are refused." : "The server takes puts again.", { undo: on ? { text: "End draining", run: () => drain(false, after) } : null });
  after?.();
}

