// The panels of a job's page. Each creates an element and renders its data.
import { breakable, card, h, show, table } from "./dom.js";
import { bytes, clock, count, duration, moment, share } from "./format.js";
import { PARTS, attempts, checkpointBars, legend, partsOf, throughput } from "./charts.js";
import { drawEdges, graph } from "./graph.js";
import { showSubtasks } from "./dialogs.js";

const empty = (text) => h("p", { class: "empty" }, text);
const widthOf = (element) => Math.max(260, Math.floor(element.clientWidth));

function panel(title, note, kind, render, ...extra) {
  const made = card(title, note, ...extra);
  if (kind) made.element.classList.add(kind);
  return { element: made.element, render: (data) => render(made, data) };
}

// For a job without a driver, `onceflow ui` returns only the facts in storage.
function whileRunning(made, data) {
  made.element.hidden = !data.overview.chains;
  return !made.element.hidden;
}

const graphPanel = (view) => panel("Dataflow", "chains of operators; shares of the last 5 s, over all subtasks", "", (made, data) => {
  if (!whileRunning(made, data) || !data.graph?.operators) return;
  const { chains, sources } = data.overview;
  show(made.body, [data.graph, chains, sources, made.body.clientWidth], () => {
    const flow = graph(data.graph, data.overview, (chain) => showSubtasks(chain, view.base));
    const names = legend([["busy", "busy"], ["pressed", "backpressured: waits for those below"]]);
    return [flow, names];
  });
  const flow = made.body.querySelector(".flow");
  if (flow) requestAnimationFrame(() => drawEdges(flow, data.graph.edges));
});

const throughputPanel = () => panel("Rows a second", "the last half hour", "two-thirds", (made, data) => {
  if (!whileRunning(made, data)) return;
  const samples = data.timeline?.samples ?? [];
  const width = widthOf(made.body);
  show(made.body, [samples.length, samples.at(-1), data.timeline?.incidents.length, width], () => {
    if (samples.length < 2) return empty("The first rates appear after a few heartbeats.");
    return [throughput(width, 200, samples, data.timeline.incidents), legend([["read-dot", "read by sources"], ["commit", "committed by sinks"], ["break-dot", "something broke"]])];
  });
});

const lagPanel = () => panel("Lag", "what the last checkpoint does not hold", "third", (made, data) => {
  if (!whileRunning(made, data)) return;
  // Without the time of the request, which changes in every answer, a quiet source is not drawn anew.
  const age = (at_s) => Math.max(0, Math.round(data.overview.now_ms / 1000 - at_s));
  const sources = data.overview.sources.map((source) => (source.progress?.moved_at_s ? { ...source, moved_ago_s: age(source.progress.moved_at_s) } : source));
  show(made.body, sources, (all) => all.map((source) => {
    if (source.progress) return measured(source);
    if (source.lag == null) return [h("h3", null, breakable(source.uid)), empty("The lag of this source is unknown: the source does not count its records, or did not answer.")];
    const highest = Math.max(1, ...source.splits.map((split) => split.lag));
    const more = source.split_count - source.splits.length;
    return [h("h3", null, breakable(source.uid), h("span", { class: "quiet" }, ` · ${count(source.lag)} in all`)),
      table(`Lag of ${source.uid}`, [
        ["Partition", "wide", (split) => breakable(split.split)],
        ["", "", (split) => h("span", { class: "level", "aria-hidden": "true" }, h("i", { "width%": (100 * split.lag) / highest }))],
        ["Position", "number", (split) => count(split.next)],
        ["Lag", "number", (split) => count(split.lag)],
      ], source.splits.slice(0, 24)),
      (more > 0 || source.splits.length > 24) && h("p", { class: "quiet" }, `The 24 furthest behind of ${count(source.split_count)}.`)];
  }));
});

const copied = (copy) => (copy.rows_expected == null ? `${count(copy.rows)} rows` : `${count(copy.rows)} of about ${count(copy.rows_expected)} rows`);

// A source whose server knows bytes and times instead of records.
function measured(source) {
  const at = source.progress;
  const row = (name, value) => h("tr", null, h("td", null, name), h("td", { class: "number" }, value));
  return [h("h3", null, breakable(source.uid)),
    at.warnings.map((text) => h("p", { class: "warn-text" }, text)),
    h("table", { class: "parts" }, h("caption", { class: "unseen" }, `Lag of ${source.uid}`), h("tbody", null,
      row("Behind", bytes(at.lag_bytes)),
      row("Behind by", at.lag_s == null ? "–" : duration(at.lag_s * 1000)),
      row("Kept by the server", bytes(at.retained_bytes)),
      row("Last move", source.moved_ago_s == null ? "–" : `${duration(source.moved_ago_s * 1000)} ago`))),
    at.copies.length > 0 && table(`First copy of ${source.uid}`, [
      ["First copy", "wide", (copy) => [breakable(copy.table), h("br"), h("small", null, copied(copy))]],
      ["", "", (copy) => copy.share != null && h("span", { class: "level", role: "img", "aria-label": share(copy.share) }, h("i", { "width%": 100 * copy.share }))],
      ["Done", "number", (copy) => share(copy.share)],
    ], at.copies)];
}

const checkpointPanel = (view) => panel("Checkpoints", "", "two-thirds", (made, data) => {
  if (!whileRunning(made, data)) return;
  const history = data.history;
  if (!history) return;
  made.note.textContent = `${count(history.completed)} completed, ${count(history.failed)} failed; time by part, of the subtask that acked last`;
  const width = widthOf(made.body);
  const shown = history.checkpoints.slice(-Math.max(12, Math.floor(width / 15)));
  const picked = shown.some((one) => one.checkpoint === view.picked) ? view.picked : shown.at(-1)?.checkpoint;
  show(made.body, [shown, history.failures, picked, width, data.overview.pending], () => {
    const failures = history.failures.slice(-5).reverse();
    return [
      shown.length ? checkpointBars(width, 230, shown, picked, (number) => view.pick(number)) : empty("No checkpoint is completed yet."),
      shown.length > 0 && legend(PARTS.map(([kind, name]) => [kind, name])),
      data.overview.pending.map((one) => h("p", { class: "quiet" }, `Under way: checkpoint ${one.checkpoint} (${one.kind}), ${count(one.acked)} subtasks have acked.`)),
      failures.length > 0 && h("details", { id: "failures" }, h("summary", null, "The last abandoned checkpoints"),
        table("Abandoned checkpoints", [
          ["Number", "number", (one) => one.checkpoint], ["When", "", (one) => moment(one.failed_at_s * 1000)], ["Why", "wide", (one) => one.reason]], failures)),
      shown.length > 0 && h("details", { id: "as-table" }, h("summary", null, "As a table"), checkpointTable(shown)),
    ];
  });
});

const checkpointTable = (shown) => table("Checkpoints", [
  ["Number", "number", (one) => one.checkpoint], ["Kind", "", (one) => one.kind], ["Triggered", "", (one) => moment(one.triggered_at_ms)],
  ["Decided after", "number", (one) => duration(one.duration_ms)], ["Committed after", "number", (one) => duration(one.committed_ms)],
  ["State", "number", (one) => bytes(one.size_bytes)], ["Slowest subtask", "", (one) => subtask(one)]], shown.slice().reverse());

const subtask = (one) => (one.slowest ? `${one.slowest.subtask.chain}[${one.slowest.subtask.index}]` : "–");

const pickedPanel = (view) => panel("One checkpoint", "", "third", (made, data) => {
  if (!whileRunning(made, data)) return;
  const all = data.history?.checkpoints ?? [];
  const one = all.find((checkpoint) => checkpoint.checkpoint === view.picked) ?? all.at(-1);
  show(made.body, one ?? null, () => {
    if (!one) return empty("There is no checkpoint yet.");
    made.note.textContent = `number ${one.checkpoint}, ${one.kind}, attempt ${one.attempt}`;
    const parts = partsOf(one);
    const rows = PARTS.map(([kind, name, why]) => h("tr", { title: why }, h("td", null, h("span", { class: `dot ${kind}` }), name), h("td", { class: "number" }, duration(kind === "commit" ? one.committed_ms : parts[kind]))));
    return [h("table", { class: "parts" }, h("caption", { class: "unseen" }, "Parts"), h("tbody", null, rows,
      h("tr", { class: "total" }, h("td", null, "Decided after"), h("td", { class: "number" }, duration(one.duration_ms))),
      h("tr", null, h("td", null, "Triggered"), h("td", { class: "number" }, clock(one.triggered_at_ms))),
      h("tr", null, h("td", null, "Slowest subtask"), h("td", { class: "number" }, `${subtask(one)} of ${count(one.subtasks)}`)),
      h("tr", null, h("td", null, "State"), h("td", { class: "number" }, `${bytes(one.size_bytes)}, ${bytes(one.uploaded_bytes)} uploaded`)),
      one.unaligned && h("tr", null, h("td", null, "Barrier"), h("td", { class: "number" }, "overtook rows"))))];
  });
});

const sinkPanel = () => panel("Sinks", "transactions of this attempt; open: subtasks that have written since their last barrier", "", (made, data) => {
  if (!whileRunning(made, data)) return;
  const operators = new Map((data.graph?.operators ?? []).map((one) => [one.uid, one]));
  show(made.body, data.overview.sinks, (sinks) => (sinks.length ? table("Sinks", [
    ["Sink", "wide", (one) => [h("b", null, breakable(one.uid)), h("br"), h("small", null, operators.get(one.uid)?.name ?? "", " · ", breakable(one.sink_id)), waits(one)]],
    ["Open", "number", (one) => count(one.open)],
    ["Prepared, in doubt", "number", (one) => count(one.prepared)],
    ["Oldest in doubt", "number", (one) => h("td", { class: `number ${one.oldest_prepared_s > 60 ? "warn" : ""}` }, one.prepared ? duration(one.oldest_prepared_s * 1000) : "–")],
    ["Committed", "number", (one) => count(one.committed)],
    ["Rows committed", "number", (one) => count(one.rows_committed)],
    ["Rejected rows", "number", (one) => h("td", { class: `number ${one.rows_rejected ? "warn" : ""}` }, count(one.rows_rejected))],
    ["Tries repeated", "number", (one) => count(one.retried)],
    ["Last commit", "number", (one) => duration(one.last_commit_ms || null)],
    ["Visible after, half", "number", (one) => duration(one.latency && one.latency.p50_s * 1000)],
    ["99 of 100", "number", (one) => duration(one.latency && one.latency.p99_s * 1000)],
  ], sinks) : empty("Sinks appear after the first recovery.")));
});

// In the first column, which is visible at every width.
const waits = (sink) => {
  const text = sink.commit_refusal ? `${sink.commit_stuck ? "is stuck and " : ""}refuses ${sink.commit_refusal}` : sink.blockers.length ? `waits for ${sink.blockers.join("; ")}` : "";
  return text && h("div", { class: "warn-text" }, text);
};

const SIGNS = { agrees: ["✓", "good", "agree"], committing: ["…", "warn", "commit under way"], ahead: ["✗", "bad", "the target is ahead"], behind: ["✗", "bad", "the target is behind"], silent: ["?", "", "the target does not tell"], unreachable: ["✗", "bad", "not reached"] };

const mark = (one) => (one ? `checkpoint ${count(one.checkpoint)}` : "nothing yet");

function witness(sink) {
  const [sign, kind, word] = SIGNS[sink.agreement];
  const listed = sink.listed_transactions ? `lists ${count(sink.listed_transactions)} transactions, ${count(sink.listed_rows)} rows, not known to be committed then` : "no transaction was open";
  return h("div", { class: "witness" },
    h("h3", null, breakable(sink.uid), h("span", { class: `pill ${kind}` }, word)),
    h("div", { class: "side" }, h("span", null, "the decision log says"), h("b", null, mark(sink.decided)), h("span", null, sink.decided ? `attempt ${sink.decided.attempt} · ${listed}` : listed)),
    h("div", { class: `sign ${kind}`, "aria-hidden": "true" }, sign),
    h("div", { class: "side" }, h("span", null, "the target's ledger says"), h("b", null, sink.agreement === "silent" || sink.agreement === "unreachable" ? "–" : mark(sink.proven)),
      h("span", null, [sink.proven && `attempt ${sink.proven.attempt}`, sink.in_doubt != null && `${count(sink.in_doubt)} prepared there`].filter(Boolean).join(" · "))),
    h("p", { class: "why" }, sink.reason));
}

const proofPanel = (view) => panel("The proof", "what the decision log says, beside what each target says of itself", "", (made, data) => {
  const proof = data.proof;
  made.element.hidden = !data.overview.running;
  show(made.body, proof ?? null, () => {
    if (!proof) return empty("The page queries no target by itself. “Read back” reads the decision log and every target's ledger now; it changes nothing.");
    if (proof.asking) return empty("Reading the log and every target …");
    if (proof.error) return h("p", { class: "bad-text" }, proof.error);
    const last = proof.decision;
    return [
      h("p", { class: "quiet" }, `Read at ${clock(proof.read_at_ms)}. `, last ? `The last decision of the log is checkpoint ${count(last.checkpoint)} of attempt ${last.attempt}, at ${clock(last.completed_at_ms)}.` : "The log holds no decision."),
      h("div", { class: "proof" }, proof.sinks.map(witness)),
    ];
  });
}, h("button", { id: "prove", onclick: () => view.prove() }, "Read back"));

const WORDS = { restart: ["Restart", "warn"], slot_lost: ["Slot lost", "bad"], failed: ["Failed", "bad"] };

const restartPanel = () => panel("Attempts and restarts", "each attempt from its start; a triangle where something broke", "", (made, data) => {
  if (!whileRunning(made, data)) return;
  const timeline = data.timeline;
  if (!timeline) return;
  const width = widthOf(made.body);
  show(made.body, [timeline.attempts, timeline.incidents, width, Math.floor(timeline.now_ms / 5000)], () => [
    timeline.attempts.length ? attempts(width, timeline) : empty("No attempt has started yet."),
    legend([["start-dot", "starting: recovery, slots, state"], ["attempt-dot", "running"], ["break-dot", "something broke"]]),
    incidentList(timeline.incidents),
  ]);
});

// A slot's error and the restart that it causes are one line.
function incidentList(all) {
  const told = all.filter((one, index) => one.kind !== "slot_lost" || all[index + 1]?.error.split("\n")[0] !== one.error.split("\n")[0]).reverse();
  if (!told.length) return empty("No failure since this driver started.");
  const list = (incidents) => h("ul", { class: "incidents" }, incidents.map(incident));
  const earlier = told.slice(5, 50);
  return [list(told.slice(0, 5)), earlier.length > 0 && h("details", { id: "earlier" }, h("summary", null, `${earlier.length} earlier`), list(earlier))];
}

function incident(one) {
  const [word, kind] = WORDS[one.kind] ?? [one.kind, ""];
  const [first, ...more] = one.error.split("\n");
  const where = [`attempt ${one.attempt}`, one.slot != null && `slot ${one.slot}`, one.delay_s != null && `next try after ${duration(one.delay_s * 1000)}`].filter(Boolean).join(" · ");
  return h("li", null,
    h("div", { class: "line" }, h("time", null, clock(one.at_ms)), h("span", { class: `pill ${kind}` }, word), h("span", { class: "what" }, first), h("span", { class: "quiet" }, where)),
    more.length > 0 && h("details", { id: `trace-${one.at_ms}-${one.kind}-${one.slot ?? ""}` }, h("summary", null, "Traceback"), h("pre", { tabindex: 0 }, one.error)));
}

const rejectedPanel = () => panel("Rejected records", "left out, or sent to the dead letters; in all attempts of this driver", "third", (made, data) => {
  if (!whileRunning(made, data)) return;
  const operators = data.graph?.operators ?? [];
  const rows = [
    ...data.overview.chains.map((one) => ({ name: one.chain, rejected: one.rejected })),
    ...data.overview.sinks.map((one) => ({ name: one.uid, rejected: one.rows_rejected })),
  ].filter((one) => one.rejected > 0);
  const letters = operators.filter((one) => one.takes_dead_letters);
  show(made.body, [rows, letters], () => [
    rows.length ? table("Rejected records", [["Operator", "wide", (one) => breakable(one.name)], ["Records", "number", (one) => count(one.rejected)]], rows) : empty("None: every record was decoded and fits its target."),
    letters.map((one) => h("p", { class: "quiet" }, `Dead letters of ${one.inputs.join(", ")} go to ${one.uid}.`)),
  ]);
});

const slotPanel = () => panel("Slots", "the processes of this attempt", "two-thirds", (made, data) => {
  if (!whileRunning(made, data)) return;
  const now = data.overview;
  show(made.body, now.slots.map((one) => ({ ...one, heard: Math.max(0, Math.round(now.now_ms / 1000 - one.heard_at_s)) })), (slots) => {
    if (!slots.length) return empty("No slot is running: the next attempt starts them.");
    const shown = slots.slice(0, 64);
    return [table("Slots", [
      ["Slot", "number", (one) => one.slot], ["Host", "wide", (one) => breakable(one.host)], ["Process", "number", (one) => one.pid],
      ["Memory", "number", (one) => bytes(one.rss_bytes || null)],
      ["Heard", "number", (one) => h("td", { class: `number ${one.heard > 5 ? "bad" : ""}` }, one.heard_at_s ? `${one.heard} s ago` : "–")],
    ], shown), shown.length < slots.length && h("p", { class: "quiet" }, `64 of ${count(slots.length)} slots.`)];
  });
});

const storedPanel = () => panel("Checkpoints and savepoints in storage", "", "", (made, data) => {
  const stored = data.stored;
  show(made.body, stored ?? null, () => {
    if (!stored) return empty("Reading storage …");
    if (stored.error) return h("p", { class: "bad-text" }, stored.error);
    made.note.textContent = stored.location;
    const rows = stored.checkpoints.slice().reverse();
    return [
      rows.length ? table("In storage", [
        ["Name", "wide", (one) => h("span", { class: "mono" }, one.name)], ["Kind", "", (one) => one.kind], ["Completed", "", (one) => moment(Date.parse(one.completed))],
        ["Attempt", "number", (one) => one.attempt], ["State", "number", (one) => bytes(one.bytes)], ["Files", "number", (one) => count(one.files)], ["Transactions", "number", (one) => count(one.transactions)],
      ], rows) : empty("Storage holds no checkpoint of this job."),
      stored.unfinished.map((text) => h("p", { class: "bad-text" }, text)),
    ];
  });
});

const failurePanel = () => panel("How it ended", "", "", (made, data) => {
  const { running, last_run: run } = data.overview;
  made.element.hidden = running || !run;
  if (made.element.hidden) return;
  show(made.body, run, () => [
    h("p", null, run.ended_ms ? `It has ${run.state} at ${moment(run.ended_ms)}, in attempt ${run.attempt}, after ${duration(run.ended_ms - run.began_ms)}.` : `Its driver, process ${run.pid} on ${run.host}, did not record its end: it was killed, or still runs. It started at ${moment(run.began_ms)}.`),
    run.error && h("pre", { tabindex: 0 }, run.error)]);
});

const settingsPanel = () => {
  const body = h("div");
  const element = h("details", { class: "card", id: "settings" }, h("summary", null, h("h2", null, "Settings")), body);
  return { element, render: (data) => {
    element.hidden = !data.settings?.settings;
    if (element.hidden) return;
    show(body, data.settings.settings, (settings) => table("Settings", [
      ["Setting", "mono", (one) => one.name],
      ["Value", "wide", (one) => (one.origin === "default" ? one.value : h("b", null, one.value))],
      ["Origin", "wide", (one) => one.origin],
      ["Default", "wide", (one) => h("td", { class: "wide quiet" }, one.default || "–")],
    ], settings));
  } };
};

export const PANELS = [failurePanel, graphPanel, throughputPanel, lagPanel, checkpointPanel, pickedPanel, sinkPanel, proofPanel, restartPanel, slotPanel, rejectedPanel, storedPanel, settingsPanel];
