// Builds elements. Text of a job is always inserted as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width%") element.style.width = `${value}%`; // not an attribute: the policy forbids inline style
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Puts `children` into `element`, unless it was built from the same data. Keeps the focus, by id, and open details.
export function show(element, data, build) {
  const key = JSON.stringify(data);
  if (element.shownKey === key) return;
  element.shownKey = key;
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...element.querySelectorAll("details[open][id]")].map((one) => one.id);
  const left = [...element.querySelectorAll(".scroll, .flow")].map((one) => one.scrollLeft);
  element.replaceChildren(...[build(data)].flat(Infinity).filter(Boolean));
  for (const id of open) {
    const folded = element.querySelector(`#${CSS.escape(id)}`);
    if (folded) folded.open = true;
  }
  element.querySelectorAll(".scroll, .flow").forEach((one, index) => (one.scrollLeft = left[index] ?? 0));
  if (focused) element.querySelector(`#${CSS.escape(focused)}`)?.focus({ preventScroll: true });
}

// A name that may wrap after its separators, but not inside a word.
export const breakable = (text) => String(text).split(/(?<=[-_./:@])/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));

// A table: columns are [heading, class, cell of a row].
export function table(caption, columns, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", null,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map(([heading, kind]) => h("th", { scope: "col", class: kind }, heading)))),
      h("tbody", null, rows.map((row) => h("tr", null, columns.map(([, kind, cell]) => {
        const content = cell(row);
        return content instanceof HTMLTableCellElement ? content : h("td", { class: kind }, content);
      }))))));
}

export function card(title, note, ...extra) {
  const body = h("div");
  const head = h("div", { class: "head" }, h("h2", null, title), h("span", { class: "note" }, note), h("span", { class: "grow" }), extra);
  const element = h("section", { class: "card", "aria-label": title }, head, body);
  return { element, body, note: head.querySelector(".note") };
}
