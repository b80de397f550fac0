// The view of one job: polls its status and shows it.
import { breakable, h, show } from "./dom.js";
import { read } from "./api.js";
import { bytes, clock, count, duration, moment } from "./format.js";
import { actionButtons } from "./dialogs.js";
import { PANELS } from "./panels.js";

const OVERVIEW_MS = 1000;
const PAST_MS = 3000;
const STORED_MS = 20_000;
const SILENT_MS = 2500;
const PATIENCE_MS = 10_000;

export const STATES = { running: "good", starting: "warn", restarting: "warn", failed: "bad", finished: "good", stopped: "", cancelled: "" };
export const pill = (state) => {
  const kind = STATES[state] ?? (state.startsWith("its driver") || state.startsWith("unknown") ? "bad" : "");
  return h("span", { class: `pill ${kind}` }, state);
};

export class JobView {
  constructor(page, job, base) {
    this.page = page;
    this.job = job;
    this.base = base;
    this.data = {};
    this.known = {};
    this.heardAt = 0;
    this.startedAt = Date.now();
    this.picked = null;
    this.timers = new Set();
    this.closed = false;
    document.title = `${job} · onceflow`;
    this.top = h("div", { class: "bar" });
    page.header.replaceChildren(this.top);
    this.tiles = h("dl", { class: "tiles", "aria-label": "Now" });
    this.panels = PANELS.map((make) => make(this));
    page.main.replaceChildren(this.tiles, ...this.panels.map((panel) => panel.element));
    this.showHeader();
    this.resized = new ResizeObserver(() => this.render());
    this.resized.observe(page.main);
    // A frozen driver accepts requests without answering them, so do not wait for its answer.
    this.watch = setInterval(() => this.isSilent() && this.render(), OVERVIEW_MS);
    this.loop("overview", OVERVIEW_MS, (now) => this.take(now));
    this.loop("timeline", PAST_MS, (timeline) => { this.data.timeline = timeline; });
    this.loop("history?limit=160", PAST_MS, (history) => { this.data.history = history; });
    this.loop("stored", STORED_MS, (stored) => { this.data.stored = stored; });
  }

  close() {
    this.closed = true;
    this.resized.disconnect();
    clearInterval(this.watch);
    this.timers.forEach(clearTimeout);
  }

  later(milliseconds, work) {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      if (!this.closed) work();
    }, milliseconds);
    this.timers.add(timer);
  }

  async loop(path, every, take) {
    try {
      const answer = await read(this.base + path, path === "overview" ? PATIENCE_MS : undefined);
      if (this.closed) return;
      take(answer);
      this.heardAt = Date.now();
      if (path === "overview") this.problem = "";
    } catch (error) {
      if (this.closed) return;
      if (error.status === 401) return this.page.expired();
      if (error.status) this.heardAt = Date.now();
      if (path === "overview") this.problem = error.status ? error.message : "";
      else if (path === "stored") this.data.stored = { error: error.message };
    }
    this.render();
    this.later(every, () => this.loop(path, every, take));
  }

  take(now) {
    const before = this.data.overview;
    this.data.overview = now;
    this.ahead = now.now_ms - Date.now();
    if (before?.instance !== now.instance || before?.running !== now.running || (now.running && !this.data.graph)) {
      this.once("graph");
      this.once("settings");
    }
  }

  async once(path) {
    try {
      this.data[path] = await read(this.base + path);
    } catch (error) {
      this.data[path] = { error: error.message };
    }
    if (!this.closed) this.render();
  }

  // Reads the log and the targets when the user requests it.
  async prove() {
    this.data.proof = { asking: true };
    this.render();
    await this.once("proof");
  }

  pick(checkpoint) {
    this.picked = checkpoint;
    this.render();
  }

  tell(kind, text) {
    clearTimeout(this.said);
    this.notice = text ? [kind, text] : null;
    this.showBanner();
    if (kind) this.said = setTimeout(() => { this.notice = null; this.showBanner(); }, 12_000);
  }

  showBanner() {
    const now = this.data.overview;
    const asOf = now ? ` What you see is as of ${clock(now.now_ms)}.` : "";
    if (this.notice) this.page.tell(...this.notice);
    else if (this.problem) this.page.tell("bad", `${this.problem}.${asOf}`);
    else if (this.isSilent()) this.page.tell("bad", `Nobody answers here: the driver has ended, was killed, or stands still.${asOf} Asking again every second.`);
    else if (now?.state === "restarting") this.page.tell("", `Restarting: ${now.last_error.split("\n")[0]}`);
    else if (now?.warnings?.length || now?.waits?.length) this.page.tell("", [...(now.warnings ?? []), ...(now.waits ?? []).map((one) => one.summary)].join("; "));
    else this.page.tell("", "");
  }

  isSilent() {
    return Date.now() - Math.max(this.heardAt, this.startedAt) > SILENT_MS;
  }

  showHeader() {
    const now = this.data.overview;
    const facts = now?.running ? `attempt ${now.attempt}${now.restores ? `, restored ${now.restores} time${now.restores > 1 ? "s" : ""}` : ""}` : "";
    const state = this.isSilent() ? "unknown: no answer" : now?.state ?? "…";
    show(this.top, [state, facts, now?.running], () => [
      this.page.brand(), h("h1", null, breakable(this.job)), pill(state), h("span", { class: "facts" }, facts), h("span", { class: "grow" }),
      now?.running && !this.isSilent() && h("div", { class: "actions", role: "group", "aria-label": "Ask of the job" }, actionButtons({
        job: this.job, base: this.base, instance: () => this.data.overview.instance, ahead: () => this.ahead, tell: (kind, text) => this.tell(kind, text),
      })),
      h("button", { class: "plain", id: "leave", onclick: () => this.page.leave() }, "Sign out"),
    ]);
  }

  render() {
    if (this.closed) return;
    this.showHeader();
    this.showBanner();
    this.page.main.classList.toggle("stale", this.isSilent());
    if (this.data.overview) {
      show(this.tiles, tilesOf(this.data.overview, this.data.timeline), (tiles) => tiles.map(tile));
      for (const panel of this.panels) panel.render(this.data);
    }
  }
}

const tile = ([title, number, unit, under, kind]) =>
  h("div", { class: `tile ${kind ?? ""}` }, h("dt", null, title), h("dd", null, number, unit && h("small", null, unit)), h("dd", { class: "under", hidden: !under }, under));

function tilesOf(now, timeline) {
  if (!now.running) return tilesWithoutDriver(now);
  const sample = timeline?.samples.at(-1);
  const lags = now.sources.map((one) => one.lag).filter((lag) => lag != null);
  const lag = lags.length ? lags.reduce((a, b) => a + b, 0) : null;
  const behind = now.sources.map((one) => one.progress?.lag_bytes).filter((size) => size != null);
  const inBytes = behind.length && lag == null;
  const sum = (key) => now.sinks.reduce((all, sink) => all + sink[key], 0);
  const last = now.last_checkpoint;
  const age = last ? now.now_ms - last.triggered_at_ms - last.duration_ms : null;
  const oldest = Math.max(0, ...now.sinks.map((sink) => sink.oldest_prepared_s));
  const rejected = now.rejected + sum("rows_rejected");
  const perSecond = (value) => (value == null ? ["–", ""] : [count(value), "/s"]);
  return [
    ["Records read", ...perSecond(sample?.records_per_s), `${count(now.records_in)} in this attempt`],
    ["Lag", inBytes ? bytes(behind.reduce((a, b) => a + b, 0)) : count(lag), "", inBytes ? "written after the last checkpoint" : lag == null ? "no source can tell" : "records behind the last checkpoint"],
    ["Rows committed", ...perSecond(sample?.rows_per_s), `${count(sum("rows_committed"))} since the driver began`],
    ["In doubt", count(sum("prepared")), "transactions", oldest ? `the oldest for ${duration(oldest * 1000)}` : "prepared, not yet committed", oldest > 60 ? "warn" : ""],
    ["Last checkpoint", last ? duration(last.duration_ms) : "–", "", last ? `number ${last.checkpoint}, ${age < 1500 ? "just now" : `${duration(Math.round(age / 1000) * 1000)} ago`}` : "none yet", age > 600_000 ? "warn" : ""],
    ["Restarts", count(Math.max(0, now.attempt_count - 1)), "", `${count(now.checkpoints_failed)} checkpoints failed${rejected ? `, ${count(rejected)} records rejected` : ""}`, now.state === "restarting" ? "warn" : ""],
  ];
}

function tilesWithoutDriver(now) {
  const run = now.last_run;
  return [
    ["State", now.state, "", run?.ended_ms ? `at ${moment(run.ended_ms)}` : "", now.state === "failed" ? "bad" : ""],
    ["Last decision", now.decision ? count(now.decision.checkpoint) : "–", "", now.decision ? `at ${moment(now.decision.completed_at_ms)}` : "nothing is decided"],
    ["Attempt", count(now.attempt || null), "", "the newest that has claimed the log"],
    ["Ran for", run?.ended_ms ? duration(run.ended_ms - run.began_ms) : "–", "", run ? `on ${run.host}, process ${run.pid}` : "nothing is written of a run"],
  ];
}
