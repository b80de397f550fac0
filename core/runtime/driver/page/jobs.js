// All jobs in a storage, whether they run or not.
import { breakable, card, h, show, table } from "./dom.js";
import { read } from "./api.js";
import { count, duration, moment } from "./format.js";
import { pill } from "./job.js";

const EVERY_MS = 3000;

export class JobsView {
  constructor(page, storage) {
    this.page = page;
    document.title = "Jobs · onceflow";
    const made = card("Jobs", storage);
    this.body = made.body;
    page.header.replaceChildren(h("div", { class: "bar" }, page.brand(), h("h1", null, "Jobs"), h("span", { class: "grow" }),
      h("button", { class: "plain", onclick: () => page.leave() }, "Sign out")));
    page.main.classList.remove("stale");
    page.main.replaceChildren(made.element);
    this.ask();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }

  async ask() {
    try {
      const { jobs } = await read("jobs");
      if (this.closed) return;
      this.page.tell("", "");
      this.render(jobs);
    } catch (error) {
      if (this.closed) return;
      if (error.status === 401) return this.page.expired();
      this.page.tell("bad", error.status ? error.message : "Nobody answers here any more: `onceflow ui` has ended. Asking again …");
    }
    this.timer = setTimeout(() => this.ask(), EVERY_MS);
  }

  render(jobs) {
    show(this.body, jobs, () => (jobs.length ? table("Jobs", [
      ["Job", "wide", (one) => h("a", { href: `#/job/${encodeURIComponent(one.job)}`, id: `job-${one.job}` }, breakable(one.job))],
      ["State", "wide", (one) => [pill(one.state), one.error && h("div", { class: "bad-text" }, one.error.split("\n")[0].slice(0, 300))]],
      ["Attempt", "number", (one) => count(one.attempt)],
      ["Last decision", "number", (one) => count(one.checkpoint)],
      ["Decided", "", (one) => moment(one.decided_at_ms)],
      ["Records/s", "number", (one) => count(one.records_per_s)],
      ["Lag", "number", (one) => count(one.lag)],
      ["In doubt", "number", (one) => count(one.in_doubt)],
      ["Oldest in doubt", "number", (one) => (one.oldest_prepared_s ? duration(one.oldest_prepared_s * 1000) : "–")],
    ], jobs) : h("p", { class: "empty" }, "This storage holds no job yet.")));
  }
}
