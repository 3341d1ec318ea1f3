// Calls of the edge app's API. Every failure becomes an Error whose text says what to do.

const NO_ANSWER = "the service does not answer; is `hemofed edge serve` still running?";

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw Object.assign(new Error(NO_ANSWER), { canRetry: true });
  }
  const body = await response.json().catch(() => null);
  if (!response.ok || body === null) throw new Error(body?.error ?? `the service failed (${response.status})`);
  return body;
}

export const fetchModel = () => request("/api/model");

/** The images in a file; `includePixels`: with pixels as a JPEG, even if the browser can draw the file. */
export const readImages = async (file, includePixels) =>
  (await request(`/api/images?name=${encodeURIComponent(file.name)}&include_pixels=${includePixels}`, { method: "POST", body: file })).images;

/** The slide's result from the summaries of its images. */
export const fetchSlide = (slide) =>
  request("/api/slide", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(slide),
  });

/** The bytes of a data URL; the content policy lets the page fetch nothing but the service. */
export function blobFromDataUrl(url) {
  const [head, text] = url.split(",");
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5).split(";")[0] });
}

export async function sha256(file) {
  const bytes = await file.arrayBuffer().catch(() => {
    throw new Error("cannot be read; drop image files, not folders");
  });
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
