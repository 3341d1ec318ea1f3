// Calls of the coordinator's HTTP API. Every failure becomes an ApiError whose text says what to do.

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

let handleSignedOut = () => {};
/** `callback` is called when the session has ended. */
export const onSignedOut = (callback) => (handleSignedOut = callback);

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new ApiError(
      0,
      "The coordinator does not answer. Check that `hemofed coordinator serve` is running and that this machine is on the network.",
    );
  }
  const text = await response.text();
  let body = null;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    body = null;
  }
  if (response.ok) return body;
  if (response.status === 401 && path !== "/api/login") handleSignedOut();
  throw new ApiError(
    response.status,
    body?.error ?? `The coordinator answered ${path} with ${response.status} ${response.statusText}.`,
  );
}

export const get = (path) => request(path);

/** The header X-Hemofed proves that the request comes from this page: other origins cannot send it. */
export const post = (path, body = {}) =>
  request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Hemofed": "1" },
    body: JSON.stringify(body),
  });

/** null if the coordinator answers 404. */
export async function getOrNull(path) {
  try {
    return await get(path);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

export const encodeSegment = (name) => encodeURIComponent(name);
export const runPath = (id, ...segments) => ["/api/runs", encodeSegment(id), ...segments].join("/");
export const filePath = (id, path) => runPath(id, "files", ...path.split("/").map(encodeSegment));
