// Starts the page: asks for the key where the server needs one, and for the status as long as the page is visible.

import { Chat } from "./chat.js";
import { request, ServerError, useKey } from "./server.js";
import { Status } from "./status.js";

const POLL_MILLISECONDS = 1000;
const RETRY_MILLISECONDS = 3000;

const byId = (id) => document.getElementById(id);
const status = new Status();
const chat = new Chat(askForKey);
let timer = 0;
let polling = false;
let described = false;
let hasKey = false;

function show(state, text) {
  const place = byId("connection");
  if (place.textContent !== text) place.textContent = text; // a screen reader announces each change
  place.dataset.state = state;
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("main").hidden = true;
  byId("key-error").textContent = hasKey ? "The server does not accept this key." : "";
  hasKey = false;
  show("waiting", "waiting for the API key");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    byId("key-error").textContent = "A key has no blanks, and no letters beyond those of ASCII.";
    return;
  }
  useKey(given);
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  hasKey = true;
  poll();
});

async function poll() {
  clearTimeout(timer);
  if (polling || document.visibilityState !== "visible" || !byId("key-form").hidden) return;
  polling = true;
  let wait = RETRY_MILLISECONDS;
  try {
    const found = await (await request("backplane/status")).json();
    status.show(found.live, found.facts);
    if (!described) {
      status.describe(found.facts);
      await chat.begin(found.facts.requests);
      described = true;
    }
    show("up", "connected");
    wait = POLL_MILLISECONDS;
  } catch (fault) {
    status.interrupt();
    described = false; // the server may be another one when it answers again
    if (!(fault instanceof ServerError)) throw fault;
    if (fault.status === 401) askForKey();
    else show("down", fault.message);
  } finally {
    polling = false;
    timer = setTimeout(poll, wait);
  }
}

document.addEventListener("visibilitychange", () => {
  status.interrupt();
  poll();
});
poll();
