// The service's HTTP API: JSON both ways, errors as text, and a header that other origins cannot send.

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

let signedOut = () => {};
export const onSignedOut = (callback) => (signedOut = callback);

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new ApiError(
      0,
      "The coordinator does not answer. Is `hemofed coordinator serve` running, and this machine on the network?",
    );
  }
  const text = await response.text();
  let told = null;
  try {
    told = text ? JSON.parse(text) : null;
  } catch {
    told = null;
  }
  if (response.ok) return told;
  if (response.status === 401 && path !== "/api/login") signedOut();
  throw new ApiError(
    response.status,
    told?.error ?? `The coordinator answered ${response.status} ${response.statusText} to ${path}.`,
  );
}

export const get = (path) => call(path);

export const post = (path, body = {}) =>
  call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Hemofed": "1" },
    body: JSON.stringify(body),
  });

/** null where there is nothing yet. */
export async function find(path) {
  try {
    return await get(path);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/** One segment of a path. */
export const part = (name) => encodeURIComponent(name);
export const runPath = (id, ...more) => ["/api/runs", part(id), ...more].join("/");
export const filePath = (id, path) => runPath(id, "files", ...path.split("/").map(part));
