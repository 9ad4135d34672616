// The options of a conversation, in a form. A new conversation begins with those that were used last.

import { element, make } from "../core/dom.js";

const KEPT = "oatmill-options";
const EXAMPLE_SCHEMA = '{"type": "object", "properties": {"steps": {"type": "array", "items": {"type": "string"}}}}';
const EXAMPLE_TOOLS =
  '[{"name": "get_weather", "description": "Weather of a city",\n  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]';

// Each field: its option, label, and the properties of its control.
const FIELDS = [
  { group: "Message", name: "system", label: "System message", rows: 3, placeholder: "You are a helpful assistant." },
  {
    name: "reasoning_effort",
    label: "Thinking",
    choices: { "": "as the model does", none: "none", low: "low", medium: "medium", high: "high" },
  },
  { group: "Sampling", name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.1, placeholder: "default" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, placeholder: "default" },
  { name: "top_k", label: "Top k", min: 0, step: 1, placeholder: "default" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, placeholder: "default" },
  { name: "max_tokens", label: "Longest answer, in tokens", min: 1, step: 1, placeholder: "what fits" },
  { name: "seed", label: "Seed", min: 0, step: 1, placeholder: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: 0.05, placeholder: "default" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, placeholder: "default" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, placeholder: "default" },
  { name: "stop", label: "Stop at the text", placeholder: "nothing" },
  { group: "Form of the answer", name: "schema", label: "JSON schema", rows: 3, json: true, placeholder: EXAMPLE_SCHEMA },
  { name: "tools", label: "Tools, as JSON", rows: 3, json: true, placeholder: EXAMPLE_TOOLS },
  { group: "For developers", name: "probabilities", label: "Show tokens by probability", switch: true },
  { name: "plain", label: "Send as plain text, without the chat template and earlier messages", switch: true },
];

export class Options {
  /** form: is filled with the fields. changed: called with the options after each change. */
  constructor(form, changed) {
    this.controls = new Map();
    let group = null;
    for (const field of FIELDS) {
      if (field.group) form.append((group = make("fieldset", {}, make("legend", {}, field.group))));
      const control = controlOf(field);
      this.controls.set(field.name, control);
      group.append(labelled(field, control));
    }
    form.addEventListener("input", () => {
      this.check();
      const options = { ...this.value, ...this.read() };
      this.value = options;
      localStorage.setItem(KEPT, JSON.stringify(options));
      changed(options);
    });
  }

  /** Returns the options for a new conversation. */
  static kept() {
    try {
      return JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      return {};
    }
  }

  /** Shows the options of a conversation. */
  show(options) {
    this.value = { ...options };
    for (const { name, switch: isSwitch } of FIELDS) {
      const control = this.controls.get(name);
      if (isSwitch) control.checked = options[name] ?? false;
      else control.value = options[name] ?? "";
    }
    this.check();
  }

  /** Sets one option that has its control elsewhere. */
  set(name, value) {
    this.value = { ...this.value, [name]: value };
    localStorage.setItem(KEPT, JSON.stringify(this.value));
    return this.value;
  }

  read() {
    return Object.fromEntries(FIELDS.map((field) => [field.name, valueOf(field, this.controls.get(field.name))]));
  }

  /** Marks JSON that is none. */
  check() {
    for (const { name, json } of FIELDS) {
      if (!json) continue;
      const control = this.controls.get(name);
      const fault = faultOf(control.value);
      control.setAttribute("aria-invalid", String(Boolean(fault)));
      element(`fault-${name}`).textContent = fault;
    }
  }
}

/** Returns short names of the options that change an answer's form or sense, to be shown beside the composer. */
export function remarkable(options) {
  return [
    options.system?.trim() && "system message",
    options.schema?.trim() && "JSON schema",
    options.tools?.trim() && "tools",
    options.plain && "plain text",
  ].filter(Boolean);
}

function controlOf({ name, label, rows, choices, switch: isSwitch, group, json, ...properties }) {
  const id = `option-${name}`;
  if (rows) return make("textarea", { id, rows, spellcheck: !json, ...properties, "aria-describedby": json && `fault-${name}` });
  if (choices) return make("select", { id }, ...Object.entries(choices).map(([value, text]) => new Option(text, value)));
  if (isSwitch) return make("input", { id, type: "checkbox", role: "switch" });
  if (properties.step === undefined) return make("input", { id, ...properties });
  return make("input", { id, type: "number", inputMode: "decimal", ...properties, step: "any" });
}

function labelled({ name, label, rows, json, switch: isSwitch }, control) {
  const text = make("span", {}, label);
  const fault = json && make("span", { className: "fault", id: `fault-${name}` });
  const kind = isSwitch ? "switch" : rows ? "wide" : "";
  return make("label", { className: `field ${kind}` }, ...(isSwitch ? [control, text] : [text, control]), fault);
}

function valueOf({ step, switch: isSwitch }, control) {
  if (isSwitch) return control.checked || undefined;
  if (step === undefined) return control.value || undefined;
  return control.value === "" || !control.validity.valid ? undefined : Number(control.value);
}

function faultOf(text) {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}
