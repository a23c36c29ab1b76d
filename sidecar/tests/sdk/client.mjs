// The npm `openai` package against a server: node client.mjs BASE_URL. Prints what it got as JSON.
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.REFLEX_NODE_MODULES, "x.js"));
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = {
  model: "m",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
};

const whole = (await client.chat.completions.create(asked)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
let error = null;
try {
  await client.chat.completions.create({ ...asked, messages: [{ role: "user", content: "x ".repeat(5000) }] });
} catch (e) {
  error = [e.code, e.status];
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const response = (await client.responses.create({ model: "m", input: asked.messages[0].content, temperature: 0 })).output_text;
// A streamed call, its arguments added up by the package; null where the worker cannot constrain.
let call = null;
try {
  const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "pick", parameters } }];
  const final = await client.chat.completions
    .stream({ ...asked, tools, tool_choice: "required", parallel_tool_calls: false })
    .finalChatCompletion();
  const made = final.choices[0].message.tool_calls[0].function;
  call = [made.name, JSON.parse(made.arguments)];
} catch (e) {
  if (e.code !== "unsupported") throw e;
}
console.log(JSON.stringify({ whole, streamed, error, models, response, call }));
