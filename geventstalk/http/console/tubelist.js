// Shared by the overview and the page of tubes: the columns of tubes, a tube's trouble, and its menu.
import { session } from "./api.js";
import { flushTube, kickTube, moveTube, pauseTube, putJob, setPause } from "./actions.js";
import { Spark } from "./chart.js";
import { MenuButton } from "./dialog.js";
import { html } from "./dom.js";
import { age, count, counted, rate, short, signed } from "./format.js";
import { filterOf } from "./filter.js";
import { Age, Num, Shape } from "./parts.js";
import { jobsHref, navigate, tubeHref } from "./route.js";

const OLD_S = 60;
const GROWS = 0.1;

function TubeLink({ tube }) {
  const why = tube.trouble.why;
  return html`<span class="tube-name"><a href=${tubeHref(tube.name)} title=${tube.name}>${tube.name}</a>${tube.paused_s > 0 && html` <span class="tag warn" title="Workers get no job">paused<span class="hide-s"> ${age(tube.pause_left_s)}</span></span>`}</span>${why && html`<small class="why" title=${why}>${why}</small>`}`;
}

/** The menu of one tube. */
export function tubeItems(tube, after, { here = false } = {}) {
  const { jobs } = tube;
  return [
    !here && { text: "Show its jobs", run: () => navigate(jobsHref(filterOf(tube.name))) },
    ...(here ? [] : [
      { text: "Put a job…", run: () => putJob({ tube: tube.name }, after) },
      null,
      tube.paused_s ? { text: "Resume", run: () => setPause(tube, 0, after) } : { text: "Pause…", run: () => pauseTube(tube, after) },
      { text: "Kick buried jobs…", disabled: !jobs.buried, run: () => kickTube(tube, after) },
    ]),
    { text: "Move its jobs…", disabled: !(jobs.ready + jobs.delayed + jobs.buried), run: () => moveTube(tube, null, after) },
    null,
    ...["ready", "delayed", "buried"].map((state) => ({
      text: `Delete ${jobs[state] ? `${counted(jobs[state], `${state} job`)}` : `${state} jobs`}…`,
      danger: true,
      disabled: !jobs[state],
      run: () => flushTube(tube, state, after),
    })),
  ];
}

function TubeMenu({ tube, after }) {
  return html`<${MenuButton} small quiet label=${`Actions of ${tube.name}`} items=${() => tubeItems(tube, after)}>⋯</${MenuButton}>`;
}

const stateColumn = (state, hide) => ({
  id: state,
  title: html`<${Shape} state=${state} />${state}`,
  num: true,
  sort: state,
  first: "descending",
  width: "w-num",
  hide,
  cell: (tube) => html`<${Num} n=${tube.jobs[state]} text=${short(tube.jobs[state])} href=${jobsHref(filterOf(tube.name, state))} of=${`${state} jobs`} />`,
});

/** The columns of a table of tubes. */
export function tubeColumns(after) {
  return [
    { id: "name", title: "Tube", sort: "name", width: "w-name", cell: (tube) => html`<${TubeLink} tube=${tube} />` },
    stateColumn("ready"),
    stateColumn("reserved", "m"),
    stateColumn("delayed", "m"),
    stateColumn("buried"),
    { id: "in", title: "in/s", num: true, sort: "put_rate", first: "descending", width: "w-rate", hide: "n", cell: (tube) => rate(tube.rates.put.m1) },
    { id: "out", title: "out/s", num: true, sort: "delete_rate", first: "descending", width: "w-rate", hide: "n", cell: (tube) => rate(tube.rates.delete.m1) },
    { id: "growth", title: "growth/s", num: true, sort: "growth", first: "descending", width: "w-rate", hide: "l", cell: (tube) => html`<span class=${tube.growth > GROWS ? "warn-text" : ""}>${signed(tube.growth)}</span>` },
    { id: "oldest", title: html`oldest<span class="hide-m">\u00a0ready</span>`, num: true, sort: "oldest_ready", first: "descending", width: "w-age", cell: (tube) => html`<span class=${tube.ages.ready > OLD_S ? "warn-text" : ""}><${Age} s=${tube.ages.ready} /></span>` },
    {
      id: "watching", title: "consumers", num: true, sort: "watching", first: "descending", width: "w-age", hide: "l",
      cell: (tube) => html`<span title=${`${counted(tube.watching, "connection watches", "connections watch")} it, ${count(tube.waiting)} of them wait for a job`} class=${tube.watching ? "" : tube.jobs.ready ? "warn-text" : "zero"}>${tube.watching ? count(tube.watching) : "none"}${tube.waiting ? html` <span class="quiet">${count(tube.waiting)} idle</span>` : ""}</span>`,
    },
    { id: "spark", title: "ready, 15 min", width: "w-spark", hide: "l", cell: (tube) => html`<${Spark} values=${tube.spark} label=${`Ready jobs of ${tube.name} over the last 15 minutes`} />` },
    session.mayChange && { id: "menu", title: "", label: "Actions", width: "w-menu", hide: "s", cell: (tube) => html`<${TubeMenu} tube=${tube} after=${after} />` },
  ].filter(Boolean);
}

/** Takes figures from the stream for the rows in view; the sparkline stays. */
export function withLive(tube, live) {
  const fresh = live.tubes.get(tube?.name);
  return fresh ? { ...fresh, spark: tube.spark } : tube;
}

