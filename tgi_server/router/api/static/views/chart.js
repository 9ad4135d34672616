// A line for each of a few values that change once a second.

const SECONDS = 120;
const HEIGHT = 100;

export class Chart {
  /** svg: where it is drawn. lines: how many. ceiling: the least value that fills its height. */
  constructor(svg, lines, ceiling) {
    this.ceiling = ceiling;
    this.top = svg.parentElement.querySelector(".top");
    this.values = Array.from({ length: lines }, () => []);
    svg.setAttribute("viewBox", `0 0 ${SECONDS - 1} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.lines = this.values.map((_, index) => {
      const line = document.createElementNS(svg.namespaceURI, "polyline");
      if (index > 0) line.classList.add("second");
      svg.append(line);
      return line;
    });
  }

  /** Adds a value to each line; what is older than two minutes goes. */
  add(...values) {
    values.forEach((value, index) => {
      this.values[index].push(value);
      if (this.values[index].length > SECONDS) this.values[index].shift();
    });
    const top = Math.max(this.ceiling, ...this.values.flat());
    this.top.textContent = `${Math.ceil(top).toLocaleString("en")} ${this.top.dataset.unit}`;
    this.values.forEach((series, index) => {
      const first = SECONDS - series.length;
      const points = series.map((value, place) => `${first + place},${HEIGHT - 2 - (value / top) * (HEIGHT - 6)}`);
      this.lines[index].setAttribute("points", points.join(" "));
    });
  }
}
