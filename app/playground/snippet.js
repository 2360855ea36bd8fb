// The current request as code that can be pasted: curl and the openai Python client.

const STANDARD = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty",
  "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options",
]);
const HIDDEN = new Set(["trace", "watch"]);

export function visible(body) {
  return Object.fromEntries(Object.entries(body).filter(([name]) => !HIDDEN.has(name)));
}

export function curl(path, body, origin) {
  const json = JSON.stringify({ ...visible(body), stream: true }, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => c);
  const pad = " ".repeat(indent + 4);
  if (Array.isArray(value)) return `[\n${value.map((v) => pad + literal(v, indent + 4)).join(",\n")},\n${" ".repeat(indent)}]`;
  return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${literal(v, indent)}`).join(", ")}}`;
}

export function python(path, body, origin) {
  const chat = path.endsWith("/chat/completions");
  const fields = visible(body);
  const standard = Object.entries(fields).filter(([name]) => STANDARD.has(name));
  const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => !STANDARD.has(name)));
  const lines = standard.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 4)},`);
  const text = chat ? "chunk.choices[0].delta.content or \"\"" : "chunk.choices[0].text";
  return [
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key="none")`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...lines, "    stream=True,", ")",
    "for chunk in stream:", "    if chunk.choices:", `        print(${text}, end="", flush=True)`,
  ].join("\n");
}
