// SPDX-License-Identifier: Apache-2.0
// Asks with OpenAI's library for Node: a question a line, an answer a line, as README.md says.
import { createInterface } from "node:readline";
import OpenAI from "openai";

const streamed = { stream: true, stream_options: { include_usage: true } };

async function completions(client, q, said) {
  const request = { model: q.model, prompt: q.prompt, max_tokens: q.limit, n: q.n, ...(q.stream ? streamed : {}) };
  const reply = await client.completions.create(request);
  for await (const chunk of q.stream ? leaving(reply, q) : [reply]) {
    for (const choice of chunk.choices) said.text(choice.index, choice.text, choice.finish_reason);
    if (chunk.usage) said.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
  }
}

async function chat(client, q, said) {
  const more = q.stream ? { ...streamed } : {};
  if (q.tools) {
    more.tools = q.tools.map((tool) => ({ type: "function", function: tool }));
    more.tool_choice = "required";
  }
  if (q.schema) more.response_format = { type: "json_schema", json_schema: { name: "answer", schema: q.schema } };
  const messages = [{ role: "user", content: q.prompt }];
  const reply = await client.chat.completions.create({
    model: q.model, messages, max_tokens: q.limit, n: q.n, ...more,
  });
  for await (const chunk of q.stream ? leaving(reply, q) : [reply]) {
    for (const choice of chunk.choices) {
      const part = q.stream ? choice.delta : choice.message;
      said.text(choice.index, part.content, choice.finish_reason);
      (part.tool_calls ?? []).forEach((c, i) => said.call(c.index ?? i, c.function.name, c.function.arguments));
    }
    if (chunk.usage) said.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
  }
}

async function responses(client, q, said) {
  const more = {};
  if (q.tools) {
    more.tools = q.tools.map((tool) => ({ type: "function", strict: true, ...tool }));
    more.tool_choice = "required";
  }
  if (q.schema) more.text = { format: { type: "json_schema", name: "answer", schema: q.schema } };
  let reply = await client.responses.create({
    model: q.model, input: q.prompt, max_output_tokens: q.limit, stream: q.stream, ...more,
  });
  let text = "";
  for await (const event of q.stream ? leaving(reply, q) : []) {
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed") reply = event.response;
  }
  if (q.leave) return;
  const whole = reply.output.flatMap((item) => item.content ?? []).map((part) => part.text).join("");
  if (q.stream && text !== whole) throw new Error("the pieces are not the whole");
  said.text(0, whole, reply.status);
  said.usage = [reply.usage.input_tokens, reply.usage.output_tokens];
  reply.output.forEach((item, i) => item.type === "function_call" && said.call(i, item.name, item.arguments));
}

// Goes through a stream, and leaves it after so many events.
async function* leaving(stream, q) {
  let events = 0;
  for await (const event of stream) {
    if (q.leave && events++ === q.leave) return;
    yield event;
  }
}

class Said {
  texts = [];
  finish = [];
  calls = [];
  text(index, text, finish) {
    this.texts[index] = (this.texts[index] ?? "") + (text ?? "");
    this.finish[index] = finish ?? this.finish[index];
  }
  call(index, name, args) {
    this.calls[index] ??= { name, arguments: "" };
    this.calls[index].arguments += args ?? "";
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const q = JSON.parse(line);
  const said = new Said();
  const client = new OpenAI({ baseURL: q.url + "/v1", apiKey: "secret", maxRetries: 0, timeout: q.timeout * 1000 });
  try {
    await { completions, chat, responses }[q.api](client, q, said);
  } catch (e) { // which one is what the tests ask
    said.error = { class: e.constructor.name, status: e.status ?? 0, message: String(e.message) };
  }
  console.log(JSON.stringify(said));
}
