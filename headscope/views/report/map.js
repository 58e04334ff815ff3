// The model map: a grid of layers and heads a stack, coloured by label or by a column of numbers.
const cells = [];
let opened = -1;

function buildMap() {
  const labels = { value: "label", text: "label", group: "what a head does" };
  fillSelect(byId("map-column"), [labels, ...columnOptions()]);
  byId("map-column").addEventListener("change", paintMap);
  byId("grids").replaceChildren(...data.stacks.map(buildGrid));
  paintMap();
  fillWhenOpened(byId("all-heads"), (place) => {
    const table = make("table");
    const rows = data.heads.map((head, i) => [
      headName(head), head.label, ...data.columns.map((column) => showWithInterval(column, i)), typeNames(head) || "–",
    ]);
    fillTable(table, ["head", "label", ...data.columns.map((column) => column.name), "types"], rows);
    place.replaceChildren(table);
  });
}

function buildGrid(stack) {
  const own = data.heads.map((head, index) => ({ head, index })).filter(({ head }) => head.stack === stack);
  const numbers = [...new Set(own.map(({ head }) => head.head))].sort((a, b) => a - b);
  const layers = [...new Set(own.map(({ head }) => head.layer))];
  const top = [make("th", { scope: "col" }, make("span", { class: "unseen" }, "layer"))];
  for (const number of numbers) top.push(make("th", { scope: "col" }, `${number}`));
  const table = make("table", { role: "grid", class: "grid", "aria-label": `${stack}: layers down, heads across` });
  table.append(make("caption", {}, stack), make("tr", { role: "row" }, ...top));
  layers.forEach((layer, row) => {
    const line = make("tr", { role: "row" }, make("th", { scope: "row" }, `L${layer}`));
    for (const number of numbers) {
      const found = own.find(({ head }) => head.layer === layer && head.head === number);
      line.append(found ? buildCell(found.index, row, numbers.indexOf(number)) : make("td", { role: "gridcell" }));
    }
    table.append(line);
  });
  table.addEventListener("keydown", (event) => moveInGrid(event, table));
  const first = table.querySelector("td[data-index]");
  first.tabIndex = 0;
  return make("div", { class: "scroll" }, table);
}

function buildCell(index, row, column) {
  const cell = make("td", { role: "gridcell", tabindex: -1, "data-index": index, "data-row": row, "data-column": column });
  cells[index] = cell;
  cell.addEventListener("click", () => openHead(index, true));
  cell.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && showTip(index));
  cell.addEventListener("pointerleave", hideTip);
  cell.addEventListener("focus", () => cell.matches(":focus-visible") && showTip(index));
  cell.addEventListener("blur", hideTip);
  return cell;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function moveInGrid(event, table) {
  const from = event.target.closest("td[data-index]");
  if (!from) return;
  const row = Number(from.dataset.row);
  const column = Number(from.dataset.column);
  const inRow = [...table.querySelectorAll(`td[data-row="${row}"][data-index]`)];
  let to = null;
  if (event.key in STEPS) {
    const [down, right] = STEPS[event.key];
    to = table.querySelector(`td[data-row="${row + down}"][data-column="${column + right}"][data-index]`);
  } else if (event.key === "Home") to = inRow[0];
  else if (event.key === "End") to = inRow[inRow.length - 1];
  else if (event.key === "Enter" || event.key === " ") openHead(Number(from.dataset.index), true);
  else if (event.key === "Escape") hideTip();
  else return;
  event.preventDefault();
  if (to) focusCell(Number(to.dataset.index));
}

function focusCell(index) {
  const cell = cells[index];
  for (const other of cell.closest("table").querySelectorAll('td[tabindex="0"]')) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}

// ---------------------------------------------------------------- colours
function paintMap() {
  const chosen = byId("map-column").value;
  const column = chosen === "label" ? null : data.columns[Number(chosen)];
  const shades = column && shadesOf(column.values);
  data.heads.forEach((head, index) => {
    const style = column ? numberStyle(shades[index]) : data.labels[head.label];
    const text = column ? short(column.values[index], shades) : head.letters;
    const said = column ? `${column.name} ${showWithInterval(column, index)}` : head.notes.join(", ");
    const cell = cells[index];
    cell.textContent = text;
    cell.style.background = style.fill;
    cell.style.color = style.ink;
    cell.classList.toggle("claimed", column?.has?.[index] === true);
    cell.setAttribute("aria-label", `${headName(head)}: ${head.label}${said && `, ${said}`}`);
  });
  paintLegend(column, shades);
}

// Where each number lies between the least and the most, 0 to 1; null for none.
function shadesOf(values) {
  const finite = values.filter((value) => value !== null);
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  const shades = values.map((value) => (value === null ? null : high > low ? (value - low) / (high - low) : 0.5));
  shades.low = low;
  shades.high = high;
  return shades;
}

function numberStyle(shade) {
  return shade === null ? { fill: "transparent", ink: "inherit" } : { fill: ramp(shade), ink: rampInk(shade) };
}

// A number in a cell: `.48`, or `1.9`; what would not fit is left to the colour.
function short(value, shades) {
  if (value === null) return "–";
  const largest = Math.max(Math.abs(shades.low), Math.abs(shades.high));
  if (largest > 1) return largest < 99.5 ? value.toFixed(largest < 9.95 ? 1 : 0) : "";
  return largest < 0.1 ? "" : value.toFixed(2).replace("0.", ".").replace("-.00", ".00");
}

function paintLegend(column, shades) {
  const legend = byId("legend");
  if (!column) {
    const counts = new Map();
    for (const head of data.heads) counts.set(head.label, (counts.get(head.label) ?? 0) + 1);
    const chips = Object.entries(data.labels).map(([name, { letter, fill, ink }]) => {
      const chip = make("span", { class: "chip", style: `background:${fill};color:${ink}` }, letter);
      return make("span", { class: "entry" }, chip, ` ${name}: ${counts.get(name) ?? "rest only"}`);
    });
    legend.replaceChildren(...chips, make("span", { class: "entry" }, "second, small: the rest of a sink; *: not stable"));
    return;
  }
  const bar = make("span", { class: "bar", style: `background:linear-gradient(to right,${RAMP.join()})` });
  const entry = make("span", { class: "entry" }, show(shades.low, column), bar, show(shades.high, column));
  const outlined = column.has ? [make("span", { class: "entry" }, "outlined: has the type")] : [];
  legend.replaceChildren(entry, ...outlined);
}

// ---------------------------------------------------------------- hover
const typeNames = (head) => [...new Set(head.types.map(([name]) => name))].join(", ");

function showTip(index) {
  const head = data.heads[index];
  const numbers = data.columns
    .map((column) => [column.name, showWithInterval(column, index), column.kind])
    .filter(([, , kind]) => kind !== "type")
    .map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, value)));
  const lines = [...head.notes, typeNames(head)].filter(Boolean).map((line) => make("div", {}, line));
  const tip = byId("tip");
  tip.replaceChildren(make("strong", {}, `${headName(head)}: ${head.label}`), ...lines, make("table", {}, ...numbers));
  tip.hidden = false;
  const cell = cells[index].getBoundingClientRect();
  const right = cell.right + 8 + tip.offsetWidth <= innerWidth;
  const left = right ? cell.right + 8 : Math.max(4, cell.left - 8 - tip.offsetWidth);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(4, Math.min(cell.top, innerHeight - tip.offsetHeight - 4))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
