// Formats numbers, sizes and times. Every function accepts null for an unknown value.
const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

function scaled(value, units, step) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  return [short.format(value), units[unit]];
}

export const count = (value) => (value == null ? UNKNOWN : whole.format(value));

export function rate(value) {
  if (value == null) return UNKNOWN;
  const [number, unit] = scaled(value, ["", "k", "M"], 1000);
  return `${number}${unit ? " " + unit : ""}/s`;
}

export function bytes(value) {
  if (value == null) return UNKNOWN;
  return scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000).join(" ");
}

export function duration(milliseconds) {
  if (milliseconds == null) return UNKNOWN;
  if (milliseconds < 10) return `${short.format(milliseconds)} ms`;
  if (milliseconds < 1000) return `${whole.format(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${Number.isInteger(seconds) ? seconds : seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const share = (value) => (value == null ? UNKNOWN : `${Math.round(value * 100)} %`);

export const clock = (milliseconds) =>
  milliseconds == null ? UNKNOWN : new Date(milliseconds).toLocaleTimeString("en", { hourCycle: "h23" });

export function moment(milliseconds) {
  if (!milliseconds) return UNKNOWN;
  const at = new Date(milliseconds);
  const day = at.toLocaleDateString("en-CA");
  return day === new Date().toLocaleDateString("en-CA") ? clock(milliseconds) : `${day} ${clock(milliseconds)}`;
}

// The ends of an axis's steps from 0 up to at least `top`.
export function ticks(top, wanted = 4) {
  const raw = Math.max(top, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = 0; at < top + step * 0.999; at += step) found.push(at);
  return found;
}
