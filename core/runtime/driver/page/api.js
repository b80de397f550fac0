// Sends requests to the endpoint. The token is in this tab's session storage and in a header, never in a URL.
const KEY = "onceflow-token";

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

const PATIENCE_MS = 60_000; // Reading storage and targets may take long.

async function ask(path, options, headers, patience = PATIENCE_MS) {
  const asked = { cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(patience), ...options };
  const response = await fetch(`v1/${path}`, { ...asked, headers: { Authorization: `Bearer ${token.get()}`, ...headers } });
  let answer = {};
  try {
    answer = await response.json();
  } catch {
    throw new Refused(response.status, `no JSON came from v1/${path} (status ${response.status})`);
  }
  if (!response.ok) throw new Refused(response.status, answer.error ?? `status ${response.status}`);
  return answer;
}

export const read = (path, patience) => ask(path, { method: "GET" }, {}, patience);

// Names the driver that the page shows, so that another driver at this address refuses the request. The deadline is a
// time of the driver's clock, which is `ahead` milliseconds ahead of ours.
export const request = (path, instance, ahead, body) =>
  ask(path, { method: "POST", body: JSON.stringify(body ?? {}) },
    { "Content-Type": "application/json", "Onceflow-Instance": instance, "Onceflow-Deadline": `${Math.round(Date.now() + ahead + 15_000)}` });
