// Charts as SVG, drawn at the size at which they are shown.
import { h, s } from "./dom.js";
import { clock, count, duration, rate, ticks } from "./format.js";

const LEFT = 58;
const BOTTOM = 22;
const TOP = 10;

export const PARTS = [
  ["delay", "Start delay", "until the barrier reached the slowest subtask"],
  ["alignment", "Alignment", "until it had come on all channels"],
  ["sync", "Synchronous", "pre-commit of sinks, freezing of state"],
  ["upload", "Upload", "state to storage"],
  ["waiting", "Other waiting", "queues and the way of the ack"],
  ["append", "Append", "to the decision log: the commit point"],
  ["commit", "Commit", "until every sink had committed"],
];

// The parts of one checkpoint in milliseconds, as its slowest subtask spent them.
export function partsOf(checkpoint) {
  const slow = checkpoint.slowest;
  const parts = {
    delay: slow?.start_delay_ms ?? 0,
    alignment: slow?.alignment_ms ?? 0,
    sync: slow?.sync_ms ?? 0,
    upload: slow?.async_ms ?? 0,
    append: checkpoint.append_ms,
    commit: checkpoint.committed_ms ?? 0,
  };
  const known = parts.delay + parts.alignment + parts.sync + parts.upload + parts.append;
  return { ...parts, waiting: Math.max(0, checkpoint.duration_ms - known) };
}

const total = (checkpoint) => Object.values(partsOf(checkpoint)).reduce((sum, part) => sum + part, 0);

export const legend = (entries) =>
  h("ul", { class: "legend" }, entries.map(([kind, label]) => h("li", null, h("span", { class: `dot ${kind}` }), label)));

function frame(width, height, top, label, format) {
  const marks = ticks(top);
  const highest = marks.at(-1);
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / highest);
  const lines = marks.map((mark) => [
    s("line", { class: mark ? "grid" : "axis", x1: LEFT, x2: width, y1: y(mark), y2: y(mark) }),
    s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, format(mark)),
  ]);
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, lines);
  return { svg, y };
}

// Stacked bars, one for each checkpoint. The arrow keys move the selection.
export function checkpointBars(width, height, checkpoints, picked, pick) {
  const highest = Math.max(...checkpoints.map(total));
  const label = `Duration of checkpoints ${checkpoints[0].checkpoint} to ${checkpoints.at(-1).checkpoint}, by part. The longest took ${duration(highest)}. Arrow keys move the selection.`;
  const { svg, y } = frame(width, height, highest, label, duration);
  const slot = (width - LEFT - 4) / checkpoints.length;
  const thick = Math.max(2, Math.min(26, slot - 2));
  checkpoints.forEach((checkpoint, index) => {
    const x = LEFT + 2 + slot * index;
    const group = s("g", { onclick: () => pick(checkpoint.checkpoint) });
    group.append(s("rect", { class: checkpoint.checkpoint === picked ? "picked" : "", x, y: TOP, width: slot, height: height - TOP - BOTTOM, fill: "transparent" }));
    const parts = partsOf(checkpoint);
    let below = 0;
    for (const [kind] of PARTS) {
      const part = parts[kind];
      if (part <= 0) continue;
      const top = y(below + part);
      group.append(s("rect", { class: kind, x: x + (slot - thick) / 2, y: top, width: thick, height: Math.max(0.5, y(below) - top) }));
      below += part;
    }
    group.append(s("title", null, `Checkpoint ${checkpoint.checkpoint}: ${duration(checkpoint.duration_ms)}`));
    svg.append(group);
  });
  const every = Math.max(1, Math.ceil(62 / slot));
  checkpoints.forEach((checkpoint, index) => {
    if ((checkpoints.length - 1 - index) % every) return;
    const x = LEFT + 2 + slot * (index + 0.5);
    svg.append(s("text", { x, y: height - 6, "text-anchor": x > width - 24 ? "end" : "middle" }, `${checkpoint.checkpoint}`));
  });
  svg.id = "checkpoint-bars";
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = checkpoints.findIndex((one) => one.checkpoint === picked);
    pick(checkpoints[Math.min(checkpoints.length - 1, Math.max(0, at + step))].checkpoint);
  });
  return svg;
}

function path(samples, key, x, y) {
  let drawn = "";
  let open = false;
  for (const sample of samples) {
    if (sample[key] == null) {
      open = false;
      continue;
    }
    drawn += `${open ? "L" : "M"}${x(sample.at_ms).toFixed(1)} ${y(sample[key]).toFixed(1)}`;
    open = true;
  }
  return drawn;
}

function timeAxis(svg, from, to, x, height, width) {
  const steps = Math.max(1, Math.floor((width - LEFT) / 130));
  for (let step = 0; step <= steps; step += 1) {
    const at = from + ((to - from) * step) / steps;
    const anchor = step === 0 ? "start" : step === steps ? "end" : "middle";
    svg.append(s("text", { x: x(at), y: height - 6, "text-anchor": anchor }, clock(at)));
  }
}

// Records read and rows committed per second. A dashed line marks each failure.
export function throughput(width, height, samples, incidents) {
  const from = samples[0].at_ms;
  const to = Math.max(samples.at(-1).at_ms, from + 10_000);
  const highest = Math.max(1, ...samples.flatMap((one) => [one.records_per_s ?? 0, one.rows_per_s ?? 0]));
  const last = samples.at(-1);
  const label = `Rows a second from ${clock(from)} to ${clock(to)}. Now ${rate(last.records_per_s)} read, ${rate(last.rows_per_s)} committed; at most ${rate(highest)}.`;
  const { svg, y } = frame(width, height, highest, label, rate);
  const x = (at) => LEFT + ((width - LEFT - 4) * (at - from)) / (to - from);
  for (const incident of incidents) {
    if (incident.at_ms < from || incident.at_ms > to) continue;
    svg.append(s("line", { class: "breaks", x1: x(incident.at_ms), x2: x(incident.at_ms), y1: TOP, y2: height - BOTTOM }));
  }
  svg.append(s("path", { class: "commits", d: path(samples, "rows_per_s", x, y) }));
  svg.append(s("path", { class: "reads", d: path(samples, "records_per_s", x, y) }));
  timeAxis(svg, from, to, x, height, width);
  return svg;
}

// Attempts one after the other: how long each took to start and then ran, and what ended it.
export function attempts(width, timeline) {
  const height = 84;
  const now = timeline.now_ms;
  const list = timeline.attempts;
  const from = list[0].began_at_s * 1000;
  const to = Math.max(timeline.ended_ms ?? now, from + 1000);
  const left = 4;
  const x = (at) => left + ((width - 2 * left) * (Math.min(Math.max(at, from), to) - from)) / (to - from);
  const breaks = timeline.incidents.filter((one) => one.at_ms >= from);
  const label = `${count(list.length)} attempts from ${clock(from)} to ${clock(to)}, ${count(breaks.filter((one) => one.kind === "restart").length)} restarts`;
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  list.forEach((attempt, index) => {
    const began = attempt.began_at_s * 1000;
    const ended = index + 1 < list.length ? list[index + 1].began_at_s * 1000 : to;
    const runs = attempt.running_s ? began + attempt.running_s * 1000 : ended;
    const title = `Attempt ${attempt.attempt} from checkpoint ${attempt.restored_checkpoint}: runs after ${duration((attempt.running_s || 0) * 1000)}`;
    const group = s("g", null, s("title", null, title));
    group.append(s("rect", { class: "starting", x: x(began), y: 26, width: Math.max(1, x(runs) - x(began)), height: 28 }));
    group.append(s("rect", { class: "attempt", x: x(runs), y: 26, width: Math.max(0, x(ended) - x(runs) - 1), height: 28 }));
    if (x(ended) - x(runs) > 34) group.append(s("text", { class: "within", x: x(runs) + 7, y: 45 }, `${attempt.attempt}`));
    svg.append(group);
  });
  for (const one of breaks) {
    const at = x(one.at_ms);
    svg.append(s("path", { class: "mark", d: `M${at - 5} 10h10l-5 10z` }, s("title", null, `${clock(one.at_ms)} ${one.error.split("\n")[0]}`)));
  }
  svg.append(s("text", { x: left, y: 74 }, clock(from)), s("text", { x: width - left, y: 74, "text-anchor": "end" }, clock(to)));
  return svg;
}
