// The conversation: sends it to the server, shows the answer while it comes, and stops it.

import { oneLine, request, ServerError } from "./server.js";

const CHAT = "/v1/chat/completions";
const byId = (id) => document.getElementById(id);

export class Chat {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.turns = []; // what was said, as the server gets it
    this.path = null;
    this.running = null; // the AbortController of the answer that is under way
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("question").addEventListener("keydown", (event) => {
      // While a text is composed from several keys, Enter ends the composition.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
  }

  // Shows the chat if the model generates text, or else what the server answers.
  async begin(requests) {
    this.path = requests?.path ?? null;
    byId("chat").hidden = this.path === null;
    byId("no-chat").hidden = this.path !== null;
    if (this.path === null) {
      const names = requests?.endpoints ?? [];
      if (!names.length) byId("no-chat-text").textContent = "It is not known which requests this server answers.";
      byId("endpoints").replaceChildren(...names.map((name) => withText("li", name)));
      return;
    }
    if (this.path !== CHAT) {
      byId("chat-title").textContent = "Completion";
      byId("question-label").textContent = "Beginning of the text";
      byId("question").placeholder = "Beginning of the text";
      byId("empty").textContent = "The model has no chat template. It continues a text.";
      byId("system").hidden = byId("system-label").hidden = true;
    }
    await this.listModels();
  }

  async listModels() {
    const listed = await (await request("v1/models")).json();
    const options = listed.data.map((model) => {
      const option = withText("option", model.parent ? `${model.id} (adapter)` : model.id);
      option.value = model.id;
      return option;
    });
    byId("model").replaceChildren(...options);
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    byId("messages").replaceChildren(byId("empty"));
    byId("empty").hidden = false;
    byId("chat-error").textContent = "";
    byId("question").focus();
  }

  async send() {
    const text = byId("question").value.trim();
    if (!text || this.running || !this.path) return;
    const body = this.body(text);
    if (body === null) return;
    const controller = (this.running = new AbortController());
    const asked = this.addMessage("own", "You", text);
    const shown = this.addMessage("answer", byId("model").value, "");
    this.update(true, "The model answers.");
    byId("chat-error").textContent = "";
    byId("question").value = "";
    const answer = new Answer(shown);
    let failure = "";
    try {
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal: controller.signal };
      const response = await request(this.path.slice(1), { ...options, body: JSON.stringify(body) });
      await answer.read(response.body);
    } catch (fault) {
      if (fault instanceof ServerError) {
        failure = fault.message;
        if (fault.status === 401) this.askForKey();
      } else if (fault.name !== "AbortError") {
        failure = answer.text ? "the connection to the server was lost" : oneLine(String(fault));
      }
    }
    this.finish(controller, answer, text, failure, [asked, shown]);
  }

  finish(controller, answer, text, failure, messages) {
    const cleared = !messages[0].root.isConnected; // meanwhile, by the button
    const stopped = controller.signal.aborted;
    this.running = null;
    byId("chat-error").textContent = cleared ? "" : failure;
    if (!cleared && !answer.text && !answer.reasoning && (failure || stopped)) {
      messages.forEach((message) => message.root.remove());
      byId("empty").hidden = this.turns.length > 0;
      if (!byId("question").value) byId("question").value = text; // to be sent again
    } else if (!cleared) {
      answer.summarize(stopped);
      this.turns.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    }
    this.update(false, cleared || failure ? "" : `${stopped ? "Stopped. " : ""}${answer.text}`);
  }

  // Returns the request, or null if a parameter is not valid.
  body(text) {
    const wrong = ["temperature", "top-p", "max-tokens"].map(byId).find((input) => !input.checkValidity());
    if (wrong) {
      wrong.closest("details").open = true;
      wrong.reportValidity();
      return null;
    }
    const body = { model: byId("model").value, stream: true, stream_options: { include_usage: true } };
    const numbers = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens" };
    for (const [name, id] of Object.entries(numbers)) {
      if (byId(id).value !== "") body[name] = byId(id).valueAsNumber;
    }
    if (this.path !== CHAT) return { ...body, prompt: text };
    const system = byId("system").value.trim();
    const before = system ? [{ role: "system", content: system }] : [];
    return { ...body, messages: [...before, ...this.turns, { role: "user", content: text }] };
  }

  addMessage(kind, who, text) {
    const list = byId("messages");
    byId("empty").hidden = true;
    const root = withText("article", "");
    root.className = `message ${kind}`;
    const name = withText("p", "");
    name.className = "who";
    name.append(withText("bdi", who));
    const reasoning = withText("div", "");
    reasoning.className = "reasoning";
    const content = withText("div", text);
    content.className = "text";
    const figures = withText("p", "");
    figures.className = "figures";
    root.append(name, reasoning, content, figures);
    list.append(root);
    list.scrollTop = list.scrollHeight;
    return { root, list, reasoning, content, figures };
  }

  update(answers, announcement) {
    byId("send").disabled = answers;
    byId("stop").disabled = !answers;
    byId("messages").setAttribute("aria-busy", String(answers));
    // A screen reader gets the whole answer once, and not each of its tokens.
    byId("announcement").textContent = announcement;
    if (document.activeElement === document.body) byId("question").focus(); // the button that had it is disabled
  }
}

// An answer that comes as a stream of server-sent events.
class Answer {
  constructor(shown) {
    this.shown = shown;
    this.text = "";
    this.reasoning = "";
    this.pieces = 0;
    this.tokens = null;
    this.reason = "";
    this.began = performance.now();
    this.first = this.last = null;
    this.nodes = { text: new Text(), reasoning: new Text() };
    shown.content.replaceChildren(this.nodes.text);
    shown.reasoning.replaceChildren(this.nodes.reasoning);
  }

  async read(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (data && data !== "[DONE]") this.take(JSON.parse(data));
      }
    }
  }

  take(event) {
    if (event.error) throw new ServerError(event.error.code ?? 0, oneLine(event.error.message ?? "the request failed"));
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    const [choice] = event.choices ?? [];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    this.add("reasoning", choice.delta?.reasoning ?? choice.delta?.reasoning_content);
    this.add("text", choice.delta?.content ?? choice.text);
  }

  add(kind, piece) {
    if (!piece) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
    this[kind] += piece;
    const { list } = this.shown;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    this.nodes[kind].appendData(piece);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  summarize(stopped) {
    const parts = [];
    if (this.tokens !== null) parts.push(this.tokens === 1 ? "1 token" : `${this.tokens} tokens`);
    const seconds = (this.last - this.first) / 1000;
    const counted = (this.tokens ?? this.pieces) - 1;
    if (counted > 0 && seconds > 0) parts.push(`${(counted / seconds).toFixed(1)} tokens/s`);
    if (this.first !== null) parts.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (stopped) parts.push("stopped");
    else if (this.reason === "length") parts.push("ended at the limit of tokens");
    else if (this.reason === "abort") parts.push("ended by the server");
    this.shown.figures.textContent = parts.join(" · ");
  }
}

function withText(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
