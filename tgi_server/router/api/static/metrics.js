// Reads Prometheus' text format.

/** Sums the samples of each metric over its labels: a Map from name to number. */
export function parseMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const [, name, value] = /^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)/.exec(line) ?? [];
    if (name) sums.set(name, (sums.get(name) ?? 0) + Number(value));
  }
  return sums;
}

/** Asks for the metrics once a second while the page is seen, and hands each answer, or null, to `receive`. */
export function watchMetrics(receive) {
  const ask = async () => {
    if (document.hidden) return;
    try {
      const response = await fetch("metrics");
      receive(response.ok ? parseMetrics(await response.text()) : null);
    } catch {
      receive(null);
    }
  };
  ask();
  setInterval(ask, 1000);
}
