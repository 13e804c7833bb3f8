// The frame of all pages: the page of an address, the bar above, the keys that work everywhere.
import { whoAmI, session, Problem } from "./api.js";
import { Dialogs, isOpen, Place } from "./dialog.js";
import { Careful, html, render, useState } from "./dom.js";
import { start, togglePause, useLive } from "./live.js";
import { Fault, Plain, useTitle } from "./parts.js";
import { navigate, route, useRoute } from "./route.js";
import { Audit } from "./pages/audit.js";
import { Connections } from "./pages/connections.js";
import { Help } from "./pages/help.js";
import { Job } from "./pages/job.js";
import { Jobs } from "./pages/jobs.js";
import { Journal } from "./pages/journal.js";
import { Nodes } from "./pages/nodes.js";
import { Overview } from "./pages/overview.js";
import { Policies } from "./pages/policies.js";
import { Tube } from "./pages/tube.js";
import { Tubes } from "./pages/tubes.js";
import { Users } from "./pages/users.js";
import { BulkChanges } from "./bulk.js";

const PAGES = { "": Overview, tubes: Tubes, jobs: Jobs, connections: Connections, users: Users, policies: Policies, journal: Journal, nodes: Nodes, audit: Audit, help: Help };
const BAR = [["", "Overview"], ["tubes", "Tubes"], ["jobs", "Jobs"], ["connections", "Connections"], ["users", "Users"], ["policies", "Policies"], ["journal", "Journal"], ["nodes", "Nodes"], ["audit", "Audit"]];
const OF_TUBES = ["tubes", "jobs", "audit", "help"]; // pages for users who may look at some tubes only
const GO = { o: "/", t: "/tubes", j: "/jobs", c: "/connections", u: "/users", r: "/policies", l: "/journal", n: "/nodes", a: "/audit" };
const SAYS = { starting: "connecting", live: "live", polling: "every second", lost: "no connection", paused: "paused" };

function Page() {
  const { page, name } = useRoute();
  if (page === "tubes" && name) return html`<${Tube} key=${name} name=${name} />`;
  if (page === "jobs" && name) return html`<${Job} key=${name} id=${name} />`;
  const Found = name ? null : session.sees_all || OF_TUBES.includes(page) ? PAGES[page] : page === "" ? Tubes : null;
  return Found ? html`<${Found} key=${page} />` : html`<${Nowhere} />`;
}

function Nowhere() {
  useTitle("No such page");
  return html`<div class="blank"><h1>There is no such page.</h1><p><code><${Plain} text=${location.pathname} /></code></p>
    <p class="buttons-line"><a class="button" href="/">Overview</a><a class="button" href="/tubes">Tubes</a><a class="button" href="/jobs">Jobs</a></p></div>`;
}

const THEMES = { auto: "as the system", light: "light", dark: "dark" };

function ThemeButton() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "auto");
  const next = { auto: "dark", dark: "light", light: "auto" }[theme];
  const change = () => {
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      if (next === "auto") localStorage.removeItem("geventstalk-theme");
      else localStorage.setItem("geventstalk-theme", next);
    } catch {
      // Then it holds until the page is left.
    }
    setTheme(next);
    dispatchEvent(new Event("theme"));
  };
  const faces = {
    auto: html`<circle cx="8" cy="8" r="5.2" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 2.8a5.2 5.2 0 0 1 0 10.4z" fill="currentColor" />`,
    dark: html`<path d="M12.8 9.800A5.5 5.5 0 0 1 6.2 3.200a5.5 5.5 0 1 0 6.6 6.600z" fill="currentColor" />`,
    light: html`<circle cx="8" cy="8" r="3" fill="currentColor" /><path d="M8 1v2M8 13v2M1 8h2M13 8h2M3 3l1.4 1.400M11.6 11.6 13 13M3 13l1.4-1.400M11.6 4.4 13 3" stroke="currentColor" stroke-width="1.5" />`,
  };
  return html`<button type="button" id="theme" class="icon" title=${`Colours: ${THEMES[theme]}`} aria-label=${`Colours: ${THEMES[theme]}. Change to ${THEMES[next]}`} onClick=${change}>
    <svg viewBox="0 0 16 16" aria-hidden="true">${faces[theme]}</svg></button>`;
}

function Beat() {
  const { state } = useLive();
  return html`<button type="button" id="beat" class="beat beat-${state}" aria-pressed=${state === "paused"} title=${state === "paused" ? "Go on refreshing (p)" : "Pause all refreshing (p)"} onClick=${togglePause}>
    <i aria-hidden="true" />${SAYS[state]}</button>`;
}

function Named() {
  useLive();
  return session.place && html`<${Place} />`;
}

/** A standby shows the jobs it has read, and names the leader. */
function Standby() {
  const node = useLive().server?.node;
  if (!node || node.serves) return null;
  return html`<div class="lost stands" role="status"><b>This node stands by.</b> ${node.leader ? `${node.leader} leads.` : "No node leads."} Nothing can be changed here, and consumers are seen there. <a href="/nodes">All nodes</a></div>`;
}

function Lost() {
  const { state, problem, at } = useLive();
  if (state !== "lost") return null;
  return html`<div class="lost" role="alert"><b>${problem.message}</b> ${at ? "What you see is what was known last. " : ""}The console tries again every 2 s.</div>`;
}

const broken = (error) => html`<div class="blank fault" role="alert"><p><b>This page has a fault.</b> ${error.message}</p>
  <p><button type="button" onClick=${() => location.reload()}>Load it again</button></p></div>`;

function App() {
  const { page, name } = useRoute();
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the contents</a>
    <header class="bar">
      <a class="brand" href="/" aria-label="geventstalk, overview"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M16 28C16 19 13 15 16 4" fill="none" stroke="currentColor" stroke-width="2.6" stroke-linecap="round" /><path fill="currentColor" d="M15.2 19.500C9.5 20 6.5 17 6 12.500c5-.3 8.4 2 9.2 7zM16 13.500c.2-4.6 3.3-7.3 9.3-6.8 0 5.1-3.8 7.7-9.3 6.800z" /></svg><span>geventstalk</span></a>
      <${Named} />
      <nav aria-label="Pages">${BAR.filter(([key]) => (session.sees_all || OF_TUBES.includes(key)) && (key !== "nodes" || session.node) && (key !== "users" || session.users)).map(([key, text]) => html`<a key=${key} href="/${key}" aria-current=${page === key ? "page" : undefined}>${text}</a>`)}</nav>
      <div class="tools">
        <${Beat} />
        ${!session.mayChange && session.node?.serves !== false && html`<span class="role" title="This token may look and change nothing">read only</span>`}
        ${session.role === "user" && html`<span class="role" title=${`You are ${session.name}: what you may do depends on the tube`}>${session.name}</span>`}
        <${ThemeButton} />
        <a class="icon" href="/help" title="Help (?)" aria-label="Help" aria-current=${page === "help" ? "page" : undefined}>?</a>
        ${session.csrf && html`<${LogOut} />`}
      </div>
    </header>
    <${Lost} />
    <${Standby} />
    <${BulkChanges} />
    <main id="main" tabindex="-1"><${Careful} key=${`${page}/${name}`} otherwise=${broken}><${Page} /></${Careful}></main>
    <${Dialogs} />`;
}

function LogOut() {
  return html`<form method="post" action="/logout" class="logout" onSubmit=${() => (session.ends = true)}><button type="submit" class="small quiet-button" title=${`You are ${session.name}`}>Log out</button></form>`;
}

let leader = -Infinity; // when `g` was pressed; never, at first and after its second key

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select, dialog");
  if (event.key === "Escape" && typing && !isOpen()) return event.target.blur();
  if (typing || isOpen()) return;
  const field = document.querySelector("[data-filter]");
  if (performance.now() - leader < 1500 && GO[event.key]) {
    leader = -Infinity;
    navigate(GO[event.key]);
  } else if (event.key === "g") leader = performance.now();
  else if (event.key === "/" && field) {
    field.focus();
    field.select();
  } else if (event.key === "/") navigate("/jobs");
  else if (event.key === "?") navigate("/help");
  else if (event.key === "p") togglePause();
  else return;
  event.preventDefault();
}

/** Links within the console change the page without a request. */
function onClick(event) {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  if (link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  if (link.pathname.startsWith("/api/")) return;
  event.preventDefault();
  navigate(link.pathname + link.search);
}

async function begin() {
  const place = document.getElementById("app");
  addEventListener("keydown", onKey);
  addEventListener("click", onClick);
  route.start();
  for (;;) {
    try {
      await whoAmI();
      break;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (problem.status === 401) return;
      await new Promise((again) => {
        render(html`<main><${Fault} problem=${problem} reload=${again} what="The console cannot begin" /></main>`, place);
        setTimeout(again, 2000);
      });
    }
  }
  start();
  render(html`<${App} />`, place);
}

begin();
