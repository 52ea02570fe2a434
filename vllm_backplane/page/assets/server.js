// Requests to the server of this page. All addresses are relative, so that a prefix of a proxy is kept.

let key = "";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The key is in this variable only: it is gone when the page is closed or loaded again.
export function useKey(value) {
  key = value;
}

export async function request(address, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(address, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ServerError(0, "the server does not answer");
  }
  if (!response.ok) throw new ServerError(response.status, messageOf(await response.text(), response.status));
  return response;
}

// The text of an error response, on one line. Its form differs between the parts of a server.
function messageOf(body, status) {
  let text = body;
  try {
    const parsed = JSON.parse(body);
    text = parsed.error?.message ?? parsed.error ?? parsed.message ?? parsed.detail ?? body;
  } catch {
    // not JSON: the body itself is the message
  }
  return oneLine(typeof text === "string" ? text : JSON.stringify(text)) || `The server answered with status ${status}.`;
}

export function oneLine(text) {
  const line = text.split(/\s+/).join(" ").trim();
  return line.length > 400 ? `${line.slice(0, 399)}…` : line;
}
