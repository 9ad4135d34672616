// Conversations as files: JSON to import again, Markdown to read.

const FORMAT = "oatmill-conversations";
const ROLES = ["user", "assistant", "tool"];
const NAMES = { user: "You", assistant: "Assistant", tool: "Result of a tool" };

export function asJson(records) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations: records }, null, 1);
}

/** Returns the shown path of a conversation as Markdown. */
export function asMarkdown(conversation) {
  const system = conversation.options.system ? [`## System\n\n${conversation.options.system}`] : [];
  const messages = conversation.path().map(({ role, text, thoughts, calls = [] }) => {
    const parts = [`## ${NAMES[role]}`];
    if (thoughts) parts.push(`<details><summary>Thoughts</summary>\n\n${thoughts}\n\n</details>`);
    if (text) parts.push(text);
    for (const call of calls) parts.push(`\`\`\`json\n${JSON.stringify({ name: call.name, arguments: call.arguments })}\n\`\`\``);
    return parts.join("\n\n");
  });
  return `${[`# ${conversation.title}`, ...system, ...messages].join("\n\n")}\n`;
}

/** Returns the records of a file that was exported. Throws an Error that tells what is wrong with it. */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON. Choose one that this page has exported.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new Error("The file has no conversations of this page. Choose one that it has exported.");
  }
  file.conversations.forEach(check);
  return file.conversations;
}

function check(record, index) {
  const texts = (object, ...names) => names.every((name) => typeof object[name] === "string");
  const isMessage = (message) =>
    texts(message, "id", "text") &&
    ROLES.includes(message.role) &&
    (message.images ?? []).every((url) => typeof url === "string" && url.startsWith("data:image/"));
  const good =
    texts(record, "id", "title") &&
    typeof record.updated === "number" &&
    typeof record.options === "object" &&
    Array.isArray(record.messages) &&
    record.messages.every(isMessage) &&
    !loops(record.messages);
  if (!good) throw new Error(`Conversation ${index + 1} of the file is damaged. Nothing was imported.`);
}

/** Returns true if a message would be above itself. A parent is older than its children. */
function loops(messages) {
  const seen = new Set([null]);
  return messages.some(({ id, parent }) => !seen.has(parent) || seen.has(id) || !seen.add(id));
}
