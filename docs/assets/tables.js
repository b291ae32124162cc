// Tables are sorted by a click on a column's head, and one that is wider than the page says that it scrolls.
const NUMBER = /-?\d[\d,]*\.?\d*/;

function key(cell) {
  const number = cell.textContent.match(NUMBER);
  return number ? parseFloat(number[0].replaceAll(",", "")) : null;
}

function compare(a, b) {
  const [x, y] = [key(a), key(b)];
  if (x !== null && y !== null) return x - y;
  if ((x === null) !== (y === null)) return x === null ? -1 : 1; // what was not measured comes last when falling
  return a.textContent.localeCompare(b.textContent);
}

function sortable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(a.cells[column], b.cells[column]));
      table.tBodies[0].append(...(falling ? rows.reverse() : rows));
    });
  });
}

function saysThatItScrolls(table) {
  const wrap = table.closest(".md-typeset__scrollwrap");
  if (!wrap || wrap.scrollWidth <= wrap.clientWidth) return;
  wrap.tabIndex = 0;
  wrap.setAttribute("role", "region");
  wrap.setAttribute("aria-label", "Table, scrolls sideways");
  const hint = document.createElement("p");
  hint.className = "scrolls";
  hint.textContent = "The table scrolls sideways \u2192";
  wrap.before(hint);
}

// The theme wraps tables after it has loaded; a folded part is measured when it opens.
window.addEventListener("load", () => setTimeout(() => {
  const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];
  tables.forEach(sortable);
  tables.filter((table) => !table.closest("details:not([open])")).forEach(saysThatItScrolls);
  document.querySelectorAll(".md-typeset details").forEach((details) => details.addEventListener(
    "toggle", () => details.querySelectorAll("table:not([class])").forEach(saysThatItScrolls), { once: true }));
}, 100));
