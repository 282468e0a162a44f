// Calls to the server this page came from. The key lives in this module, and nowhere else.

let key = "";

export function setKey(value) {
  key = value.trim();
}

/** A refusal; the message is the server's own sentence. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function get(path, signal) {
  return (await call(path, { signal })).json();
}

/** The events of a streamed answer, each a parsed body. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refusal("the connection ended before the answer did", 0);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Refusal(said.error.message, 200);
      yield said;
    }
  }
}

async function call(path, options) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("the server cannot be reached", 0);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refusal(said?.error?.message ?? `the server answered ${response.status}`,
    response.status);
}
