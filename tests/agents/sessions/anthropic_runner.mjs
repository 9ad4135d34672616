// The tool runner of Anthropic's SDK, with streams.

import { execSync } from 'node:child_process';
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { z } from 'zod';

const run = betaZodTool({
  name: 'run',
  description: 'Runs a shell command and returns its output.',
  inputSchema: z.object({ command: z.string() }),
  run: ({ command }) => execSync(command, { encoding: 'utf8' }),
});
const runner = new Anthropic({ maxRetries: 0 }).beta.messages.toolRunner({
  model: 'oatmill',
  max_tokens: 500,
  system: 'Use the tool.',
  messages: [{ role: 'user', content: process.argv[2] }],
  tools: [run],
  stream: true,
});
for await (const stream of runner) {
  for await (const event of stream) {
    if (event.type === 'content_block_delta' && event.delta.type === 'text_delta') process.stdout.write(event.delta.text);
  }
}
