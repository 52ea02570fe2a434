// Line charts and stacked bars, drawn as SVG. The values are in tables beside them, for those who do not see the charts.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 60;
export const POINTS = 120;

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

export class LineChart {
  // `classes` has a class of page.css for each line. `top` is the value at the upper edge, or 0 to fit the values; the
  // element `scale` shows it as `format` returns it.
  constructor(svg, scale, classes, format, top = 0) {
    this.svg = svg;
    this.scale = scale;
    this.format = format;
    this.top = top;
    this.rows = [];
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.groups = classes.map((name) => element("g", { class: name }));
    svg.replaceChildren(...this.groups);
  }

  // Adds a value for each line, or null after a time in which nothing was measured.
  push(values) {
    this.rows.push(values);
    if (this.rows.length > POINTS) this.rows.shift();
    const highest = Math.max(...this.rows.flat().filter((value) => value !== null), 0);
    const top = this.top || roundedUp(highest);
    this.scale.textContent = `2 minutes, 0 to ${this.format(top)}`;
    this.groups.forEach((group, line) => {
      group.replaceChildren(...this.pieces(line, top).map((points) => element("polyline", { points })));
    });
    this.svg.dataset.samples = String(this.rows.length);
  }

  // The points of one line, as a list of texts: a new one begins after each gap.
  pieces(line, top) {
    const found = [[]];
    const first = POINTS - this.rows.length;
    this.rows.forEach((row, place) => {
      const value = row === null ? null : row[line];
      if (value === null) {
        found.push([]);
        return;
      }
      const x = ((first + place) / (POINTS - 1)) * WIDTH;
      const y = HEIGHT - 1 - Math.min(value / top, 1) * (HEIGHT - 2);
      found.at(-1).push(`${x.toFixed(1)},${y.toFixed(1)}`);
    });
    return found.filter((points) => points.length).map((points) => points.join(" "));
  }
}

// Returns the next of 1, 2, 5, 10, 20 and so on, so that the scale of a chart seldom changes.
function roundedUp(value) {
  let step = 1;
  for (;;) {
    for (const factor of [1, 2, 5]) {
      if (factor * step >= value) return factor * step;
    }
    step *= 10;
  }
}

// Draws parts of a whole side by side. `parts` has pairs of a class and a value.
export function drawBar(svg, parts, whole) {
  svg.setAttribute("viewBox", "0 0 100 4");
  svg.setAttribute("preserveAspectRatio", "none");
  let x = 0;
  svg.replaceChildren(
    ...parts.map(([name, value]) => {
      const width = whole > 0 ? (value / whole) * 100 : 0;
      const part = element("rect", { class: name, x: x.toFixed(2), y: 0, width: width.toFixed(2), height: 4 });
      x += width;
      return part;
    }),
  );
}

export function bar() {
  return element("svg", { class: "bar", "aria-hidden": "true" });
}
