// Server-sent events: shows when the connection is lost, reconnects, and disconnects while the page is hidden.

import { get } from "./api.js";
import { announce, h } from "./dom.js";

const MIN_RETRY_MS = 1000;
const MAX_RETRY_MS = 30000;

/**
 * Opens a stream and returns a function that closes it. `path()` and `onOpen()` are called at every connection;
 * `handlers`: event name -> function of the event's data.
 */
export function listen(path, handlers, onOpen = () => {}) {
  let source = null;
  let timer = null;
  let retryDelay = MIN_RETRY_MS;
  let isClosed = false;

  function connect() {
    clearTimeout(timer);
    if (isClosed || document.hidden) return;
    source?.close();
    source = new EventSource(path());
    source.addEventListener("open", () => {
      retryDelay = MIN_RETRY_MS;
      showConnection(true);
      onOpen();
    });
    source.addEventListener("error", reconnectLater);
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(event.data ? JSON.parse(event.data) : null));
    }
  }

  function reconnectLater() {
    if (isClosed) return;
    showConnection(false);
    source.close(); // an EventSource does not retry by itself after an HTTP error
    get("/api/me").catch(() => {}); // shows the login if the token was revoked
    timer = setTimeout(connect, retryDelay);
    retryDelay = Math.min(2 * retryDelay, MAX_RETRY_MS);
  }

  function onVisibilityChange() {
    if (document.hidden) {
      clearTimeout(timer);
      source?.close();
    } else connect();
  }

  function close() {
    isClosed = true;
    clearTimeout(timer);
    source?.close();
    document.removeEventListener("visibilitychange", onVisibilityChange);
    showConnection(true, { silent: true });
  }

  document.addEventListener("visibilitychange", onVisibilityChange);
  connect();
  return close;
}

function showConnection(isConnected, { silent = false } = {}) {
  const region = document.getElementById("connection");
  const wasLost = region.hasChildNodes();
  if (isConnected && wasLost) {
    region.replaceChildren();
    if (!silent) announce("Connected again.");
  }
  if (!isConnected && !wasLost) {
    region.append(h("p", null, "Connection to the coordinator lost; this page may be out of date. Reconnecting…"));
  }
}
