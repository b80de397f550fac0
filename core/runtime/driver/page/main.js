// Shows one job, or all jobs of a storage, to a user with the token.
import { h } from "./dom.js";
import { read, token } from "./api.js";
import { JobView } from "./job.js";
import { JobsView } from "./jobs.js";

const main = document.getElementById("main");
const header = document.getElementById("header");
const banner = document.getElementById("banner");
let view = null;
let about = null;

export function tell(kind, text) {
  banner.replaceChildren(...(text ? [h("div", { class: `banner ${kind}` }, h("p", null, text))] : []));
}

const brand = () => h("a", { class: "brand", href: "#", "aria-label": "onceflow" }, h("img", { src: "page/icon.svg", alt: "" }), "onceflow");

function leave() {
  token.forget();
  askToken("");
}

function askToken(wrong) {
  view?.close();
  view = null;
  tell("", "");
  document.title = "onceflow";
  header.replaceChildren(h("div", { class: "bar" }, brand(), h("h1", null, "Sign in")));
  const input = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-hint" });
  main.replaceChildren(h("section", { class: "card gate" },
    h("h2", null, "The token, please"),
    h("p", { id: "token-hint" }, "The status contains host names and records, so reading it needs the token, too. ",
      h("code", null, "onceflow ui"), " prints it. A driver leaves it in ", h("code", null, "<storage>/<job>/driver.token"), ", or where ", h("code", null, "endpoint.token_file"), " says."),
    wrong && h("p", { class: "wrong", role: "alert" }, wrong),
    h("form", { onsubmit: (event) => {
      event.preventDefault();
      token.set(input.value.trim());
      begin().then(() => view && main.focus());
    } },
    h("label", { for: "token" }, "Token", input),
    h("p", null, "It stays in this tab until the tab is closed."),
    h("div", { class: "buttons" }, h("button", { class: "main", type: "submit" }, "Show the job")))));
  input.focus();
}

async function begin() {
  if (!token.get()) return askToken("");
  try {
    about = await read("about");
  } catch (error) {
    if (error.status === 401) return askToken("The token is wrong or out of date.");
    tell("bad", error.status ? error.message : "Nobody answers at this address. Asking again …");
    setTimeout(begin, 2000);
    return;
  }
  tell("", "");
  route();
}

function route() {
  if (!about) return;
  view?.close();
  const chosen = /^#\/job\/(.+)$/.exec(location.hash);
  const page = { main, header, tell, brand, leave, expired: () => askToken("The token is out of date: another driver uses this address now.") };
  if (about.kind === "job") view = new JobView(page, about.job, "");
  else if (chosen) {
    const job = decodeURIComponent(chosen[1]);
    view = new JobView(page, job, `jobs/${encodeURIComponent(job)}/`);
  } else view = new JobsView(page, about.storage);
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") main.focus();
  else route();
});
begin();
