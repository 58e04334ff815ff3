// One head: its weights as a heatmap or as lines between tokens, its numbers and the evidence for its types.
const decoded = new Map();
const FLOOR = 0.02;
const LISTED = 3;
let refillLooks = null;
let heatmapPlot = null;

function buildHead() {
  byId("previous").addEventListener("click", () => openHead((opened + data.heads.length - 1) % data.heads.length, false));
  byId("next").addEventListener("click", () => openHead((opened + 1) % data.heads.length, false));
  byId("back").addEventListener("click", () => focusCell(opened));
  byId("head").addEventListener("keydown", (event) => event.key === "Escape" && focusCell(opened));
  byId("views-of-head").addEventListener("change", () => drawWeights());
  refillLooks = fillWhenOpened(byId("looks"), (place) => {
    const found = weightsOf(opened);
    const table = make("table");
    const rows = found ? found.queries.map((query, row) => [query, strongest(found, row)]) : [];
    fillTable(table, ["token", "looks at"], rows);
    place.replaceChildren(table);
  });
}

function openHead(index, focus) {
  hideTip();
  if (opened >= 0) cells[opened].removeAttribute("aria-selected");
  opened = index;
  cells[index].setAttribute("aria-selected", "true");
  const head = data.heads[index];
  const { fill, ink } = data.labels[head.label];
  byId("head-title").replaceChildren(
    `${headName(head)} `, make("span", { class: "chip wide", style: `background:${fill};color:${ink}` }, head.label),
  );
  byId("head-notes").textContent = [...head.notes, `key-value head ${head.kv_head}`].join("; ");
  fillNumbers(byId("head-numbers"), index, (column) => column.kind !== "type");
  fillNumbers(byId("head-scores"), index, (column) => column.kind === "type");
  byId("head-scores").closest("details").hidden = !data.columns.some((column) => column.kind === "type");
  byId("head-types").replaceChildren(...head.types.map(([name, ...lines]) =>
    make("div", { class: "type" }, make("h3", {}, name), ...lines.map((line) => make("p", {}, line)))));
  drawWeights();
  refillLooks();
  if (focus) byId("head-title").focus();
}

// The head's numbers; chance and the spread over texts only where they are known of some.
function fillNumbers(table, index, wanted) {
  const columns = data.columns.filter((column) => wanted(column) && column.values[index] !== null);
  const more = ["chance", "sd"].filter((name) => columns.some((column) => column[name]));
  const rows = columns.map((column) => [
    column.name, showWithInterval(column, index), ...more.map((name) => show(column[name]?.[index], column)),
  ]);
  fillTable(table, ["number", "value", ...more], rows);
}

// ---------------------------------------------------------------- weights
// The head's matrix, row after row, with the labels of its sides; null where none was kept.
function weightsOf(index) {
  const head = data.heads[index];
  const map = data.maps.find((m) => m.stack === head.stack && m.layer === head.layer && m.heads.includes(head.head));
  if (!map) return null;
  if (!decoded.has(map)) decoded.set(map, Uint8Array.from(atob(map.weights), (c) => c.charCodeAt(0)));
  const [queries, keys] = [data.axes[map.queries], data.axes[map.keys]];
  const place = map.heads.indexOf(head.head);
  const size = queries.length * keys.length;
  const bytes = decoded.get(map).subarray(place * size, (place + 1) * size);
  const scale = map.scales[place];
  return { queries, keys, scale, tile: map.tile, roots: bytes, weight: (row, key) => scale * (bytes[row * keys.length + key] / 255) ** 2 };
}

function strongest({ keys, weight }, row) {
  const sorted = keys.map((key, i) => [key, weight(row, i)]).sort((a, b) => b[1] - a[1]);
  return sorted.slice(0, LISTED).filter(([, w]) => w > 0).map(([key, w]) => `${key} ${w.toFixed(2)}`).join(", ") || "nothing";
}

function drawWeights() {
  const found = weightsOf(opened);
  const lines = document.querySelector('input[name="view"]:checked').value === "lines";
  byId("views-of-head").hidden = byId("looks").hidden = !found;
  byId("heatmap").hidden = !found || lines;
  byId("lines").hidden = !found || !lines;
  byId("matrix-note").textContent = found ? noteOf(found) : "No matrix of this head was kept.";
  if (!found) return;
  byId("heatmap").setAttribute("aria-label", `weights of ${headName(data.heads[opened])}; the table below has the largest`);
  if (lines) drawLines(found);
  else if (heatmapPlot) drawHeatmap(found);
}

function noteOf({ tile, scale, queries, keys }) {
  const cell = tile > 1 ? `each cell is the mean of ${tile} × ${tile} tokens` : `${queries.length} × ${keys.length} tokens of the first text`;
  return `${cell}; colours are roots of weights, from 0 to this head's largest, ${show(scale)}`;
}

// ---------------------------------------------------------------- lines between tokens
function drawLines(found) {
  const { queries, keys, weight } = found;
  const height = 22;
  const left = queries.map((token, row) => tokenButton(token, `looks at ${strongest(found, row)}`));
  const right = keys.map((token) => tokenButton(token, "who looks at it"));
  const svg = makeSvg("svg", {
    viewBox: `0 0 100 ${height * Math.max(queries.length, keys.length)}`, preserveAspectRatio: "none", "aria-hidden": "true",
    style: `height:${height * Math.max(queries.length, keys.length)}px`,
  });
  const drawn = [];
  queries.forEach((_, row) => keys.forEach((_key, key) => {
    const w = weight(row, key);
    if (w < FLOOR) return;
    const line = makeSvg("line", {
      x1: 0, y1: (row + 0.5) * height, x2: 100, y2: (key + 0.5) * height, "stroke-opacity": w.toFixed(3),
    });
    drawn.push({ row, key, line });
    svg.append(line);
  }));
  const list = (buttons, name) => make("ol", { "aria-label": name }, ...buttons.map((button) => make("li", {}, button)));
  const box = make("div", { class: "columns" }, list(left, "query tokens"), svg, list(right, "key tokens"));
  const hint = make("p", { class: "hint" }, `from each query token to the keys it looks at with ${FLOOR} or more; point at a token for its own, click to keep`);
  byId("lines").replaceChildren(box, hint);
  const view = { found, left, right, drawn, kept: null };
  left.forEach((button, row) => listen(button, view, { row }));
  right.forEach((button, key) => listen(button, view, { key }));
}

function tokenButton(token, said) {
  return make("button", { type: "button", "aria-label": `${token}: ${said}` }, make("bdi", {}, token), make("span", { class: "share" }));
}

function listen(button, view, place) {
  const still = () => highlight(view, view.kept);
  button.addEventListener("pointerenter", () => highlight(view, place));
  button.addEventListener("pointerleave", still);
  button.addEventListener("focus", () => highlight(view, place));
  button.addEventListener("blur", still);
  button.addEventListener("click", () => {
    const same = view.kept && view.kept.row === place.row && view.kept.key === place.key;
    view.kept = same ? null : place;
    for (const other of [...view.left, ...view.right]) other.setAttribute("aria-pressed", `${other === button && !same}`);
    highlight(view, view.kept ?? place);
  });
}

// Only the lines of one token, with the weights at their other ends; all of them for null.
function highlight({ found, left, right, drawn }, place) {
  for (const { row, key, line } of drawn) {
    line.toggleAttribute("hidden", place !== null && place.row !== row && place.key !== key);
  }
  const one = (button, w) => {
    button.style.setProperty("--share", w === null ? 0 : Math.sqrt(w / found.scale));
    button.querySelector(".share").textContent = w === null || w < FLOOR / 2 ? "" : w.toFixed(2);
  };
  left.forEach((button, row) => one(button, place?.key === undefined ? null : found.weight(row, place.key)));
  right.forEach((button, key) => one(button, place?.row === undefined ? null : found.weight(place.row, key)));
}
