"use strict";
// The page's data and small helpers. All text goes in as text nodes: nothing in it can become markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

// Three decimals, three digits for scores of importance, which may be tiny; a dash for what is missing.
function show(value, column) {
  if (value === null || value === undefined) return "–";
  return column?.kind === "importance" ? value.toPrecision(3) : value.toFixed(3).replace(/^-(0\.0*)$/, "$1");
}

// A head's number in a column, with its interval, and ~ where it is no better than chance.
function showWithInterval(column, index) {
  const mark = column.at_chance?.[index] ? "~" : "";
  return show(column.values[index], column) + mark + interval(column, index, " [", "]");
}

function interval(column, index, before = "", after = "") {
  const low = column.low?.[index] ?? null;
  const high = column.high?.[index] ?? null;
  return low === null || high === null ? "" : `${before}${show(low, column)}, ${show(high, column)}${after}`;
}

function headName(head) {
  return data.stacks.length > 1 ? `${head.stack} ${head.name}` : head.name;
}

function fillTable(table, headings, rows) {
  const cells = (row, tag) => row.map((cell, i) => make(i ? tag : "th", i ? {} : { scope: "row" }, cell));
  const top = make("tr", {}, ...headings.map((heading) => make("th", { scope: "col" }, heading)));
  table.replaceChildren(
    make("thead", {}, top),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row, "td")))),
  );
}

// A table that is made when it is first opened: most readers never do.
function fillWhenOpened(details, fill) {
  const check = () => {
    if (details.open && !details.dataset.filled) {
      details.dataset.filled = "yes";
      fill(details.querySelector("div"));
    }
  };
  details.addEventListener("toggle", check);
  return () => {
    delete details.dataset.filled;
    check();
  };
}

// Seventeen steps of the colour map cividis, evenly apart.
const RAMP = [
  "#00224e", "#002c66", "#1a386f", "#31446b", "#434e6c", "#535a6c", "#62656f", "#6f7073", "#7d7c78", "#8c8878",
  "#9b9476", "#aca271", "#bcaf6b", "#cdbc61", "#deca54", "#f0d942", "#fee838",
];
const ramp = (share) => RAMP[Math.round(share * (RAMP.length - 1))];
const rampInk = (share) => (share > 0.45 ? "#000000" : "#ffffff");

function fillSelect(select, options) {
  const groups = new Map();
  for (const { value, text, group } of options) {
    if (!groups.has(group)) groups.set(group, make("optgroup", { label: group }));
    groups.get(group).append(make("option", { value }, text));
  }
  select.replaceChildren(...groups.values());
}

const KINDS = { metric: "metrics", stability: "over the texts", type: "scores of types", importance: "importance" };
const columnOptions = () =>
  data.columns.map((column, value) => ({ value, text: column.name, group: KINDS[column.kind] }));
