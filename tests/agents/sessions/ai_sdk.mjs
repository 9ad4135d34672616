// An agent of the AI SDK. Arguments: an API, `generate` or `stream`, and the task.

import { execSync } from 'node:child_process';
import { createAnthropic } from '@ai-sdk/anthropic';
import { openai } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [api, mode, prompt] = process.argv.slice(2);
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`, authToken: process.env.ANTHROPIC_AUTH_TOKEN });
const run = tool({
  description: 'Runs a shell command and returns its output.',
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command, { encoding: 'utf8' }),
});
const settings = {
  model: api === 'anthropic' ? anthropic('oatmill') : openai('oatmill'),
  system: 'Use the tool.',
  prompt,
  tools: { run },
  stopWhen: stepCountIs(5),
  maxRetries: 0,
};
if (mode === 'generate') {
  console.log((await generateText(settings)).text);
} else {
  const result = streamText({ ...settings, onError: ({ error }) => { throw error; } });
  for await (const piece of result.textStream) process.stdout.write(piece);
}
