// Server-sent events that say when they are lost, come back by themselves, and rest while nobody looks.

import { announce, h } from "./dom.js";
import { get } from "./api.js";

const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 30000;

/**
 * `path` is asked and `opened` runs at every (re)connection; handlers: event name -> function of its JSON.
 * Returns what closes it.
 */
export function listen(path, handlers, opened = () => {}) {
  let source = null;
  let timer = null;
  let pause = FIRST_PAUSE;
  let closed = false;

  function connect() {
    clearTimeout(timer);
    if (closed || document.hidden) return;
    source?.close();
    source = new EventSource(path());
    source.addEventListener("open", () => {
      pause = FIRST_PAUSE;
      say(true);
      opened();
    });
    source.addEventListener("error", lost);
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(event.data ? JSON.parse(event.data) : null));
    }
  }

  function lost() {
    if (closed) return;
    say(false);
    source.close(); // its own retries give up after an error page; ours do not
    get("/api/me").catch(() => {}); // a token that was revoked leads to the login
    timer = setTimeout(connect, pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }

  function look() {
    if (document.hidden) {
      clearTimeout(timer);
      source?.close();
    } else connect();
  }

  function close() {
    closed = true;
    clearTimeout(timer);
    source?.close();
    document.removeEventListener("visibilitychange", look);
    say(true, false);
  }

  document.addEventListener("visibilitychange", look);
  connect();
  return close;
}

function say(connected, aloud = true) {
  const place = document.getElementById("lost");
  const was = place.hasChildNodes();
  if (connected && was) {
    place.replaceChildren();
    if (aloud) announce("Connected again.");
  }
  if (!connected && !was) {
    place.append(h("p", null, "Connection to the coordinator lost: what you see may be old. Trying again…"));
  }
}
