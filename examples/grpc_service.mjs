// The gRPC service from Node.js: a call with a deadline, and a stream. usage: node grpc_service.mjs [HOST:PORT]
// npm install @grpc/grpc-js @grpc/proto-loader

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const proto = fileURLToPath(new URL("../proto/llm.proto", import.meta.url));
const definition = protoLoader.loadSync(proto, { keepCase: true, defaults: true });
const { LLMRunner } = grpc.loadPackageDefinition(definition);
const runner = new LLMRunner(process.argv[2] ?? "127.0.0.1:8000", grpc.credentials.createInsecure());

// One answer. The time-out is in milliseconds; without a model the text is empty and the metadata give the reason.
function ask(question) {
  const request = { formatted_prompt: question, max_tokens: 60, timeout: 30_000 };
  return new Promise((resolve, reject) => {
    let answer;
    const call = runner.call_model(request, (error, response) => (error ? reject(error) : (answer = response)));
    call.on("status", ({ metadata }) => resolve({ ...answer, reason: metadata.get("empty-reason")[0] }));
  });
}

// Pieces of an answer as they are generated; the last message has the reason why it ended.
async function* stream(question) {
  for await (const piece of runner.stream_model({ formatted_prompt: question, max_tokens: 60, timeout: 30_000 })) {
    yield piece;
  }
}

const { text, reason, finish_reason, generated_tokens } = await ask("What can I use instead of butter?");
console.log(text ? `answer: ${text} (${finish_reason}, ${generated_tokens} tokens)` : `no answer: ${reason}`);

process.stdout.write("stream: ");
for await (const piece of stream("How do I hang a picture?")) {
  process.stdout.write(piece.text);
  if (piece.finish_reason) console.log(` (${piece.finish_reason})`);
}
runner.close();
