"use strict";
// What Bokeh draws: the heatmap, the ranking, the curve. Its tooltips show text, never markup.
const documents = [];
const LABEL_HEIGHT = 13;

async function buildPlots() {
  Bokeh.set_log_level("error");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => documents.forEach(paintPlot));
  heatmapPlot = (await embed("weights", "heatmap")).get_model_by_name("weights");
  drawWeights();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawWeights();
    width = innerWidth;
  });
  whenNear("ranked", async () => buildRanking(await embed("ranked", "ranked")));
  if (data.plots.curve) whenNear("curve", () => embed("curve", "curve"));
  document.documentElement.dataset.ready = "yes";
}

async function embed(name, place) {
  const [view] = await Bokeh.embed.embed_item(data.plots[name], place);
  const found = view.model.document;
  documents.push(found);
  paintPlot(found);
  return found;
}

// Plots below the screen are drawn when a reader comes near: the page opens sooner.
function whenNear(id, draw) {
  const observer = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    observer.disconnect();
    draw();
  }, { rootMargin: "400px" });
  observer.observe(byId(id));
}

// The page's colours of text and lines, which follow the reader's choice of light or dark.
function paintPlot({ _all_models: models }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, paper] = ["--ink", "--line", "--paper"].map((name) => style.getPropertyValue(name).trim());
  for (const model of models.values()) {
    if (model.type === "Figure") {
      model.setv({ background_fill_color: paper, border_fill_color: paper, outline_line_color: null });
    }
    if (model.type.endsWith("Axis")) {
      model.setv({
        axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: faint,
        major_tick_line_color: faint, minor_tick_line_color: null, axis_label_text_font_style: "normal",
      });
    }
    if (model.type === "Grid") model.setv({ grid_line_color: faint });
    if (model.type === "Legend") model.setv({ background_fill_color: null, border_line_color: null, label_text_color: ink });
  }
}

// ---------------------------------------------------------------- heatmap
function drawHeatmap(found) {
  const { queries, keys, weight, roots } = found;
  const columns = { x: [], y: [], shade: [], weight: [], query: [], key: [] };
  queries.forEach((query, row) => keys.forEach((key, i) => {
    columns.x.push(i);
    columns.y.push(row);
    columns.shade.push(roots[row * keys.length + i] / 255);
    columns.weight.push(weight(row, i));
    columns.query.push(query);
    columns.key.push(key);
  }));
  heatmapPlot.document.get_model_by_name("weights-source").data = columns;
  heatmapPlot.x_range.setv({ start: -0.5, end: keys.length - 0.5 });
  heatmapPlot.y_range.setv({ start: queries.length - 0.5, end: -0.5 });
  const room = Math.max(byId("head").clientWidth - 130, 150);
  const side = Math.min(room, 560, Math.max(28 * Math.max(queries.length, keys.length), 150));
  const cell = side / Math.max(queries.length, keys.length);
  heatmapPlot.setv({
    frame_width: Math.round(Math.max(cell * keys.length, 60)), frame_height: Math.round(Math.max(cell * queries.length, 60)),
  });
  labelAxis(heatmapPlot.below[0], keys, cell);
  labelAxis(heatmapPlot.left[0], queries, cell);
}

// As many labels as there is room for. Text models and not strings, in which Bokeh would look for formulas.
function labelAxis(axis, labels, cell) {
  const step = Math.ceil(LABEL_HEIGHT / cell);
  const ticks = labels.map((_, i) => i).filter((i) => i % step === 0);
  const PlainText = Bokeh.Models.get("PlainText");
  axis.ticker.ticks = ticks;
  axis.major_label_overrides = new Map(ticks.map((i) => [i, new PlainText({ text: labels[i] })]));
}

// ---------------------------------------------------------------- ranking
let ranking = [];
let rankedSource = null;

function buildRanking(found) {
  const select = byId("ranked-column");
  fillSelect(select, columnOptions());
  const important = data.columns.findIndex((column) => column.kind === "importance");
  select.value = `${Math.max(important, 0)}`;
  select.addEventListener("change", drawRanking);
  rankedSource = found.get_model_by_name("ranked-source");
  const { selected } = rankedSource;
  selected.properties.indices.change.connect(() => {
    const [chosen] = selected.indices;
    if (chosen === undefined) return;
    openHead(ranking[chosen], true);
    selected.indices = [];
  });
  drawRanking();
}

function drawRanking() {
  const column = data.columns[Number(byId("ranked-column").value)];
  const known = data.heads.map((_, index) => index).filter((index) => column.values[index] !== null);
  ranking = known.sort((a, b) => column.values[a] - column.values[b]);
  const pick = (values) => ranking.map((index) => values?.[index] ?? NaN);
  rankedSource.data = {
    x: ranking.map((_, place) => place),
    value: pick(column.values),
    low: pick(column.low),
    high: pick(column.high),
    chance: pick(column.chance),
    color: ranking.map((index) => data.labels[data.heads[index].label].fill),
    head: ranking.map((index) => headName(data.heads[index])),
    label: ranking.map((index) => data.heads[index].label),
    interval: ranking.map((index) => interval(column, index) || "–"),
  };
  const notes = ["colours are the labels'"];
  if (column.low) notes.push(column.kind === "importance" ? "lines: two standard errors over texts" : "lines: 95 % intervals over texts");
  if (column.chance) notes.push("dashes: chance");
  byId("ranked-note").textContent = `${notes.join("; ")}. The table of all heads has the numbers.`;
}

buildPlots();
