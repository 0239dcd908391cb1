// SPDX-License-Identifier: Apache-2.0
// Asks with Vercel's AI SDK: a question a line, an answer a line, as README.md says.
import { createInterface } from "node:readline";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would go to the answers

async function ask(q, said) {
  const pdkit = createOpenAICompatible({
    name: "pdkit", baseURL: q.url + "/v1", apiKey: "secret", includeUsage: true, supportsStructuredOutputs: true,
  });
  const leave = new AbortController();
  const request = {
    model: q.api === "chat" ? pdkit.chatModel(q.model) : pdkit.completionModel(q.model),
    prompt: q.prompt, maxOutputTokens: q.limit, maxRetries: 0,
    abortSignal: AbortSignal.any([leave.signal, AbortSignal.timeout(q.timeout * 1000)]),
  };
  if (q.tools) {
    const named = (t) => [t.name, tool({ inputSchema: jsonSchema(t.parameters) })];
    request.tools = Object.fromEntries(q.tools.map(named));
    request.toolChoice = "required";
  }
  if (q.schema) request.output = Output.object({ schema: jsonSchema(q.schema) });
  let reply;
  if (q.stream) {
    reply = streamText({ ...request, onError() {} });
    let events = 0;
    for await (const part of reply.fullStream) {
      if (part.type === "error") throw part.error;
      if (q.leave && part.type === "text-delta" && ++events === q.leave) {
        leave.abort();
        return;
      }
    }
  } else {
    reply = await generateText(request);
  }
  const usage = await reply.totalUsage;
  const text = await reply.text;
  if (q.schema && JSON.stringify(await reply.output) !== JSON.stringify(JSON.parse(text))) {
    throw new Error("the object is not the text");
  }
  said.texts = [text];
  said.finish = [(await reply.finishReason).replace("-", "_")];
  said.calls = (await reply.toolCalls).map((c) => ({ name: c.toolName, arguments: JSON.stringify(c.input) }));
  said.usage = [usage.inputTokens, usage.outputTokens];
}

for await (const line of createInterface({ input: process.stdin })) {
  const q = JSON.parse(line);
  const said = {};
  try {
    await ask(q, said);
  } catch (e) { // which one is what the tests ask
    said.error = { class: e.name, status: e.statusCode ?? 0, message: String(e.message) };
  }
  console.log(JSON.stringify(said));
}
