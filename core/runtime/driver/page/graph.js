// The dataflow: chains of operators in layers, upstream first, with the current activity of each chain.
import { breakable, h, s } from "./dom.js";
import { count, rate, share } from "./format.js";

function layersOf(chains, edges) {
  const depth = new Map(chains.map((chain) => [chain, 0]));
  for (const chain of chains) // Upstream chains come first.
    for (const edge of edges.filter((one) => one.below === chain)) depth.set(chain, Math.max(depth.get(chain), depth.get(edge.above) + 1));
  const layers = [];
  for (const chain of chains) (layers[depth.get(chain)] ??= []).push(chain);
  return layers;
}

const label = (operator) => {
  if (operator.takes_dead_letters) return `${operator.name} · dead letters`;
  return operator.kind === "source" || operator.kind === "sink" ? operator.name : operator.kind.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
};

function chainBox(chain, operators, load, lag, open) {
  const busy = load?.busy;
  const pressed = load?.backpressured;
  const meter = `busy ${share(busy)}, backpressured ${share(pressed)}`;
  const fact = (dot, what, value) => [h("dt", null, dot && h("span", { class: `dot ${dot}` }), what), h("dd", null, value)];
  return h("button", { class: "chain", id: `chain-${chain}`, "data-chain": chain, onclick: () => open(chain), title: "Show its subtasks" },
    h("ul", { class: "operators" }, operators.map((one) => h("li", null, h("b", null, breakable(one.uid)), h("span", null, label(one))))),
    h("span", { class: "share", role: "img", "aria-label": meter },
      h("i", { class: "busy", "width%": (busy ?? 0) * 100 }), h("i", { class: "pressed", "width%": (pressed ?? 0) * 100 })),
    h("dl", null,
      fact("busy", "busy", share(busy)),
      load?.subtasks > 1 && busy != null && fact("", "busiest subtask", `${share(load.busy_max)} [${load.busiest}]`),
      fact("pressed", "backpressured", share(pressed)),
      fact("", "in", rate(load?.records_in_per_s)),
      operators.at(-1).kind !== "sink" && fact("", "out", rate(load?.records_out_per_s)),
      lag != null && fact("", "lag", count(lag)),
      load?.rejected > 0 && fact("", "rejected", count(load.rejected))));
}

export function graph(view, overview, open) {
  const chains = [...new Set(view.operators.map((one) => one.chain))];
  const load = new Map(overview.chains.map((one) => [one.chain, one]));
  const lags = new Map(overview.sources.map((one) => [one.uid, one.lag]));
  const flow = h("div", { class: "flow" }, s("svg", { "aria-hidden": "true" }),
    layersOf(chains, view.edges).map((layer) => h("div", { class: "layer" },
      layer.map((chain) => chainBox(chain, view.operators.filter((one) => one.chain === chain), load.get(chain), lags.get(chain), open)))));
  requestAnimationFrame(() => drawEdges(flow, view.edges));
  return flow;
}

// Called once the boxes have their sizes.
export function drawEdges(flow, edges) {
  const svg = flow.querySelector("svg");
  if (!svg || !flow.isConnected) return;
  const origin = flow.getBoundingClientRect();
  const box = (chain) => {
    const rect = flow.querySelector(`[data-chain="${CSS.escape(chain)}"]`).getBoundingClientRect();
    return { left: rect.left - origin.left + flow.scrollLeft, right: rect.right - origin.left + flow.scrollLeft, top: rect.top - origin.top, bottom: rect.bottom - origin.top };
  };
  svg.setAttribute("width", flow.scrollWidth);
  svg.setAttribute("height", flow.scrollHeight);
  svg.replaceChildren(...edges.flatMap((edge) => {
    const from = box(edge.above);
    const to = box(edge.below);
    const way = edge.exchange === "by_key" ? `by ${edge.key.join(", ")}` : edge.exchange;
    if (to.left <= from.right) { // On a narrow screen the boxes are stacked.
      const x = (Math.max(from.left, to.left) + Math.min(from.right, to.right)) / 2;
      return arrow(`M${x} ${from.bottom}V${to.top - 7}`, `M${x - 5} ${to.top - 8}h10l-5 8z`, x, (from.bottom + to.top) / 2 + 3, way);
    }
    const [y1, y2, middle] = [(from.top + from.bottom) / 2, (to.top + to.bottom) / 2, (from.right + to.left) / 2];
    return arrow(`M${from.right} ${y1}C${middle} ${y1} ${middle} ${y2} ${to.left - 7} ${y2}`, `M${to.left - 8} ${y2 - 5}v10l8 -5z`, middle, (y1 + y2) / 2 - 8, way);
  }));
}

const arrow = (line, tip, x, y, name) => [
  s("path", { class: "edge", d: line }), s("path", { class: "edge-tip", d: tip }), s("text", { class: "edge-label", x, y }, name)];
