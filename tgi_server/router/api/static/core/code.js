// A request as code for other programs.

/**
 * Returns code that sends a request. request: {path, body}, without what only streams need. language: "curl", "Python"
 * or "gRPC". url: the server's URL. needsKey: true if the server needs an API key.
 */
export function codeFor(request, language, url, needsKey) {
  return { curl: curlCode, Python: pythonCode, gRPC: grpcCode }[language](shortened(request), url, needsKey);
}

/** Returns the request with images by their beginnings: the code is to be read. */
function shortened(request) {
  const cut = (text) => text.replace(/(data:image\/[a-z]+;base64),[A-Za-z0-9+/=]+/g, "$1,...");
  return JSON.parse(JSON.stringify(request), (_, value) => (typeof value === "string" ? cut(value) : value));
}

function curlCode({ path, body }, url, needsKey) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = needsKey ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${url}/${path.replace("_stream", "")}${key} -H 'Content-Type: application/json' \\\n  -d '${text}'`;
}

function pythonCode({ path, body }, url, needsKey) {
  const key = needsKey ? 'os.environ["API_KEY"]' : '"unused"';
  const imports = needsKey ? "import os\n\n" : "";
  const named = (object) => Object.entries(object).map(([name, value]) => `    ${name}=${pythonValue(value)},\n`);
  if (path === "generate_stream") {
    const lines = named(body.parameters).join("");
    const token = needsKey ? `, token=${key}` : "";
    return (
      `${imports}from huggingface_hub import InferenceClient\n\nclient = InferenceClient("${url}"${token})\n` +
      `text = client.text_generation(\n    ${pythonValue(body.inputs)},\n${lines})\nprint(text)`
    );
  }
  const own = ["top_k", "min_p", "repetition_penalty", "continue_final_message"]; // not OpenAI's
  const pick = (keep) => Object.fromEntries(Object.entries(body).filter(([name]) => own.includes(name) === keep));
  const extra = pick(true);
  const lines = named({ ...pick(false), ...(Object.keys(extra).length && { extra_body: extra }) }).join("");
  return (
    `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url="${url}/v1", api_key=${key})\n` +
    `answer = client.chat.completions.create(\n${lines})\nprint(answer.choices[0].message.content)`
  );
}

function grpcCode({ body }) {
  const content = body.messages?.at(-1)?.content ?? body.inputs;
  const parts = Array.isArray(content) ? content : [{ text: content }];
  const text = parts.map((part) => part.text ?? "").join("");
  const images = parts.some((part) => part.image_url) ? '        images=[open("image.jpg", "rb").read()],\n' : "";
  const tokens = body.max_tokens ?? body.parameters?.max_new_tokens ?? 256;
  return (
    `# llm_functionalities, with the stubs of proto/llm.proto; it renders no chat template and has no stop sequences\n` +
    `import grpc\nfrom shared.stubs import llm_pb2, llm_pb2_grpc\n\n` +
    `with grpc.insecure_channel("127.0.0.1:8000") as channel:\n` +
    `    request = llm_pb2.ModelRequest(\n        formatted_prompt=${pythonValue(text)},\n${images}` +
    `        max_tokens=${tokens},\n        timeout=30_000,\n    )\n` +
    `    print(llm_pb2_grpc.LLMRunnerStub(channel).call_model(request).text)`
  );
}

/** JSON is Python but for three words, which occur outside strings only as whole values. */
function pythonValue(value) {
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(", ")}]`;
  if (value === true || value === false) return value ? "True" : "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each)}`).join(", ")}}`;
}
