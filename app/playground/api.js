// Talks to the server: JSON requests, server-sent events read from a fetch, errors as sentences.
// Knows nothing of the page beyond the key field's value, which the caller hands in.

export class ServerError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = sessionStorage.getItem("everstream.key") ?? "";

export function setKey(value) {
  key = value.trim();
  sessionStorage.setItem("everstream.key", key);
}

function headers(extra = {}) {
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

function sentence(status, body) {
  const message = body?.error?.message ?? body?.detail ?? "";
  if (message) return String(message);
  if (status === 401) return "The server wants an API key: open “API key” on the left and paste one.";
  if (status === 429) return "The server's queue is full: wait a moment and send again.";
  if (status === 503) return "The server is loading or restarting: it will be back in a moment.";
  return `The server answered with status ${status}.`;
}

async function fail(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    body = null; // an error page that is no JSON: the status says enough
  }
  throw new ServerError(sentence(response.status, body), response.status, body?.error?.param ?? null);
}

export async function getJSON(path, signal) {
  const response = await fetch(path, { headers: headers(), signal });
  if (!response.ok) await fail(response);
  return response.json();
}

export async function postJSON(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
  });
  if (!response.ok) await fail(response);
  return response.json();
}

// Splits a text stream into server-sent events and yields the data of each.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      yield data; // a comment line gives "": the connection lives
    }
  }
}

// POSTs and yields each chunk as an object; ends at [DONE]; throws ServerError for an error before or in the stream.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", signal, headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) await fail(response);
  let ended = false;
  for await (const data of events(response)) {
    if (data === "") continue;
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(sentence(0, chunk), 0, chunk.error.param ?? null);
    yield chunk;
  }
  if (!ended) throw new ServerError("The connection was lost before the answer was complete: send the message again.", 0, null);
}

// A GET whose events go on for ever (the live feed); yields objects.
export async function* feed(path, signal) {
  const response = await fetch(path, { headers: headers(), signal });
  if (!response.ok) await fail(response);
  for await (const data of events(response)) if (data) yield JSON.parse(data);
}
