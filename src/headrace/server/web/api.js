// Talks to the server: the API key, errors in words, server-sent events over fetch (EventSource cannot send a key).

const KEY = "headrace-api-key";
let asking = null; // the promise of a key, while the dialog is open

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    const error = document.getElementById("key-error");
    error.textContent = wrong;
    error.hidden = !wrong;
    input.value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      resolve(input.value.trim());
      input.value = "";
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// fetch, with the key if there is one; asks for one when it is wanted. ApiError for what is not 2xx.
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached. Is it still running?");
    }
    if (response.status === 401) {
      const given = await askForKey(key ? "The server does not know this key." : "");
      if (given) sessionStorage.setItem(KEY, given);
      else throw new ApiError(401, "This server wants an API key.");
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await messageOf(response));
    return response;
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();
export const getText = async (path, options) => (await call(path, options)).text();

// The events of a stream as objects, until it ends. ApiError for an error that comes as an event.
export async function* events(path, options = {}) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection broke before the answer was finished.");
      }
      if (part.done) return;
      const pieces = (rest + part.value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        if (!piece.startsWith("data: ")) continue;
        const data = piece.slice(6);
        if (data === "[DONE]") return;
        const value = JSON.parse(data);
        if (value.error) throw new ApiError(500, value.error.message);
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
