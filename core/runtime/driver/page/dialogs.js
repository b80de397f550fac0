// The dialogs that send a command to a job after a confirmation, and the dialog of one chain's subtasks.
import { h, table } from "./dom.js";
import { count, rate, share } from "./format.js";
import { read, request } from "./api.js";

const dialog = () => document.getElementById("dialog");

function openDialog(title, ...content) {
  const box = dialog();
  box.classList.remove("broad");
  box.replaceChildren(h("h2", { id: "dialog-title" }, title), ...content);
  box.showModal();
  return box;
}

const field = (id, text, hint) => h("label", { for: id }, text, h("input", { type: "text", id, placeholder: hint, autocomplete: "off", spellcheck: "false" }));
const check = (id, text) => h("label", { class: "check" }, h("input", { type: "checkbox", id }), h("span", null, text));
const value = (id) => document.getElementById(id)?.value.trim() || undefined;
const ticked = (id) => document.getElementById(id)?.checked || undefined;

const ACTIONS = {
  checkpoint: {
    button: "Checkpoint", title: "Take a checkpoint now?",
    text: "Everything read so far becomes visible in the targets once the checkpoint is decided. The job runs on.",
    fields: () => [], body: () => ({}),
  },
  savepoint: {
    button: "Savepoint", title: "Take a savepoint?",
    text: "A copy of the job's state that you own. The job runs on, and the savepoint commits nothing.",
    fields: () => [field("path", "Directory", "the job's own, if left empty"), check("native", "In the state backend's native form: faster, but only this backend can read it")],
    body: () => ({ path: value("path"), native: ticked("native") ?? false }),
  },
  stop: {
    button: "Stop", title: "Stop the job?", danger: true,
    text: "A last checkpoint commits everything that was read. The next start continues from there.",
    fields: () => [check("savepoint", "Take a savepoint before the stop"), check("drain", "Drain: end all sources first, so that windows and functions finish (with a savepoint)"), field("path", "Directory of the savepoint", "the job's own, if left empty")],
    body: () => (ticked("savepoint") || ticked("drain") ? { savepoint: true, drain: ticked("drain") ?? false, path: value("path") } : {}),
  },
  cancel: {
    button: "Cancel", title: "Cancel the job?", danger: true,
    text: "The job ends at once, without a checkpoint. Rows since the last checkpoint are rolled back; the next start reads them again.",
    fields: () => [], body: () => ({}),
  },
};

export function actionButtons(context) {
  return Object.entries(ACTIONS).map(([name, action]) =>
    h("button", { id: `act-${name}`, class: action.danger ? "danger" : "", onclick: () => confirmAction(name, action, context) }, action.button));
}

function confirmAction(name, action, context) {
  const form = h("form", { method: "dialog", onsubmit: (event) => {
    event.preventDefault();
    const body = action.body();
    dialog().close();
    carryOut(name, action, body, context);
  } },
  h("p", null, action.text), action.fields(),
  h("div", { class: "buttons" },
    h("button", { type: "button", id: "dialog-no", onclick: () => dialog().close() }, "Leave it"),
    h("button", { type: "submit", id: "dialog-yes", class: action.danger ? "main danger" : "main" }, action.button)));
  openDialog(`${action.title}`, h("p", { class: "quiet" }, `Job ${context.job}`), form);
}

async function carryOut(name, action, body, context) {
  const tell = context.tell;
  try {
    tell("", `${action.button}: asked …`);
    let answer = await request(`${context.base}${name}`, context.instance(), context.ahead(), body);
    while (answer.state === "pending") {
      await new Promise((resolve) => setTimeout(resolve, 400));
      answer = await read(`${context.base}operations/${encodeURIComponent(answer.operation)}`);
    }
    if (answer.state === "done") tell("good", `${action.button}: done${answer.result ? ` (${answer.place || answer.result})` : ""}`);
    else tell("bad", `${action.button} failed: ${answer.error}`);
  } catch (error) {
    tell("bad", `${action.button}: ${error.status ? error.message : "the driver did not answer; look in the decision log whether it was done"}`);
  }
}

export async function showSubtasks(chain, base) {
  const content = h("div", null, h("p", { class: "quiet" }, "Asking …"));
  const box = openDialog(`Subtasks of ${chain}`, content, h("div", { class: "buttons" }, h("button", { onclick: () => dialog().close() }, "Close")));
  box.classList.add("broad");
  try {
    const { subtasks } = await read(`${base}subtasks?chain=${encodeURIComponent(chain)}`);
    subtasks.sort((a, b) => (b.load?.busy ?? 0) - (a.load?.busy ?? 0));
    const shown = subtasks.slice(0, 200);
    content.replaceChildren(
      h("p", { class: "quiet" }, `${count(subtasks.length)} subtasks, the busiest first${shown.length < subtasks.length ? `; the first ${shown.length} are shown` : ""}`),
      table(`Subtasks of ${chain}`, [
        ["Subtask", "number", (one) => one.metrics.subtask.index],
        ["Slot", "number", (one) => one.slot],
        ["Busy", "number", (one) => share(one.load?.busy)],
        ["Backpressured", "number", (one) => share(one.load?.backpressured)],
        ["In", "number", (one) => rate(one.load?.records_in_per_s)],
        ["Out", "number", (one) => rate(one.load?.records_out_per_s)],
        ["Records in", "number", (one) => count(one.metrics.records_in)],
        ["Batches waiting", "number", (one) => count(one.metrics.input_batches)],
        ["Rejected", "number", (one) => count(one.metrics.rejected)],
      ], shown));
  } catch (error) {
    content.replaceChildren(h("p", { class: "bad-text" }, error.message));
  }
}
