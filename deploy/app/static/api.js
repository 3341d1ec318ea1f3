// The service on this machine. Whatever goes wrong becomes an Error whose text says what to do.

const GONE = "the service does not answer; is `hemofed edge serve` still running?";

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw Object.assign(new Error(GONE), { again: true });
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok || body === null) throw new Error(body?.error ?? `the service failed (${answer.status})`);
  return body;
}

export const about = () => asked("/api/about");

/** A list of pictures; `drawn`: with pixels as a JPEG, also where the browser should be able to draw the file. */
export const read = async (file, drawn) =>
  (await asked(`/api/read?name=${encodeURIComponent(file.name)}&drawn=${drawn}`, { method: "POST", body: file })).pictures;

export const verdict = (counts) =>
  asked("/api/verdict", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(counts),
  });

/** Bytes of a data URL; the page may fetch nothing but the service. */
export function blobOf(url) {
  const [head, text] = url.split(",");
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5).split(";")[0] });
}

export async function digestOf(file) {
  const bytes = await file.arrayBuffer().catch(() => {
    throw new Error("cannot be read; drop picture files, not folders");
  });
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
