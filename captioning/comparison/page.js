/** Parts that fold, and reading values off the curves: with the pointer, a finger, or the arrow keys. */
const folds = [...document.querySelectorAll("details.part, details.how")];
if (matchMedia("(max-width: 600px)").matches) {
  folds.forEach((fold) => (fold.open = false));
  // The first screen has room for one curve.
  document.querySelector(".curves .charts")?.prepend(...document.querySelectorAll(".lead figure:nth-child(n + 2)"));
}

// Paper folds nothing away.
const closed = new Set();
addEventListener("beforeprint", () => {
  document.querySelectorAll("main details:not([open])").forEach((fold) => closed.add(fold));
  closed.forEach((fold) => (fold.open = true));
});
addEventListener("afterprint", () => {
  closed.forEach((fold) => (fold.open = false));
  closed.clear();
});

const values = document.querySelector(".values");
const SVG = "http://www.w3.org/2000/svg";

for (const chart of document.querySelectorAll("[data-chart]")) {
  const curves = JSON.parse(chart.dataset.chart);
  const stops = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  const cursor = document.createElementNS(SVG, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 0);
  cursor.setAttribute("y2", 206);
  let stop = stops.length - 1;

  const nearest = (points, x) =>
    points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));

  function show() {
    const x = stops[stop];
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    chart.append(cursor);
    const lines = curves
      .map((curve) => ({ ...curve, point: nearest(curve.points, x) }))
      .sort((a, b) => a.point[1] - b.point[1])
      .map(({ name, color, point }) => {
        const line = document.createElement("p");
        const run = document.createElement("span");
        run.className = "chip";
        run.style.setProperty("--run", color);
        run.textContent = name;
        line.append(run, ` ${point[3]} at step ${point[2].toLocaleString("en")}`);
        return line;
      });
    values.replaceChildren(...lines);
    values.hidden = false;
    const box = chart.getBoundingClientRect();
    const at = box.left + (x / chart.viewBox.baseVal.width) * box.width;
    const left = at + values.offsetWidth + 16 < document.documentElement.clientWidth ? at + 10 : at - values.offsetWidth - 10;
    values.style.left = `${Math.max(4, left) + scrollX}px`;
    values.style.top = `${box.top + scrollY + 8}px`;
  }

  function hide() {
    cursor.remove();
    values.hidden = true;
  }

  function follow(event) {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    stop = stops.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(stops[best] - x) ? i : best), 0);
    show();
  }

  chart.addEventListener("pointermove", follow);
  chart.addEventListener("pointerdown", follow);
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation(); // the explorer's arrow keys turn words
    if (!values.hidden) stop = Math.min(stops.length - 1, Math.max(0, stop + moves[event.key]));
    show();
  });
}
