// A request as code of other programs.

import { chatRequest, requestBody } from "./stream.js";

/** Returns code that sends the wish to `url`. language: "curl", "Python" or "gRPC". */
export function codeFor(wish, language, url) {
  return { curl: curlCode, Python: pythonCode, gRPC: grpcCode }[language](wish, url);
}

function curlCode(wish, url) {
  const path = wish.chat ? "v1/chat/completions" : "generate";
  const body = JSON.stringify(wish.chat ? chatRequest(wish) : requestBody(wish)).replaceAll("'", "'\\''");
  const key = wish.apiKey ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${url}/${path}${key} -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

function pythonCode(wish, url) {
  const key = wish.apiKey ? 'os.environ["API_KEY"]' : '"unused"';
  const imports = wish.apiKey ? "import os\n\n" : "";
  if (wish.chat) {
    const { model, messages, ...rest } = chatRequest(wish);
    const options = { model, messages, ...rest };
    const given = Object.entries(options).filter(([, value]) => value !== undefined);
    const lines = given.map(([name, value]) => `    ${name}=${pythonValue(value)},`).join("\n");
    return (
      `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url="${url}/v1", api_key=${key})\n` +
      `answer = client.chat.completions.create(\n${lines}\n)\nprint(answer.choices[0].message.content)`
    );
  }
  const { inputs, parameters } = requestBody(wish);
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  const lines = given.map(([name, value]) => `, ${name}=${pythonValue(value)}`).join("");
  const token = wish.apiKey ? `, token=${key}` : "";
  return (
    `${imports}from huggingface_hub import InferenceClient\n\nclient = InferenceClient("${url}"${token})\n` +
    `print(client.text_generation(${pythonValue(inputs)}${lines}))`
  );
}

function grpcCode(wish) {
  return (
    `# llm_functionalities, with the stubs of proto/llm.proto; which renders no chat template and has no stop sequences\n` +
    `import grpc\nfrom shared.stubs import llm_pb2, llm_pb2_grpc\n\n` +
    `with grpc.insecure_channel("127.0.0.1:8000") as channel:\n` +
    `    request = llm_pb2.ModelRequest(\n        formatted_prompt=${pythonValue(wish.prompt)},\n` +
    (wish.images?.length ? `        images=[open("image.jpg", "rb").read()],\n` : "") +
    `        max_tokens=${wish.maxNewTokens},\n        timeout=30_000,\n    )\n` +
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
