"use strict";
// What every section shares: the page can be read without it. Tables are sorted, searched and copied; texts are copied.
const profkit = (() => {
const byId = (id) => document.getElementById(id);

const element = (kind, text, className) => {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

const button = (label, click) => {
  const made = element("button", label);
  made.type = "button";
  made.addEventListener("click", click);
  return made;
};

const copyText = async (text, from) => {
  const said = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from a file may not use the clipboard: select a text field and let the browser copy that.
    const field = element("textarea", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = said; }, 1200);
};

// Data stand in the page gzipped, in base 64.
const unpack = async (id) => {
  const holder = byId(id);
  if (!holder) return null;
  const raw = Uint8Array.from(atob(holder.textContent.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

const valueOf = (row, at) => row.cells[at] ? row.cells[at].dataset.value ?? row.cells[at].textContent : "";
const isNumber = (text) => text !== "" && Number.isFinite(Number(text));

const sortRows = (rows, at, down) => rows.sort((one, other) => {
  const [a, b] = [valueOf(one, at), valueOf(other, at)];
  // What is unknown comes last, whichever way the rest is sorted.
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = isNumber(a) && isNumber(b) ? Number(a) - Number(b) : a.localeCompare(b);
  return down ? -order : order;
});

// A search hides rows; the choice of a module leaves rows out.
const isListed = (row) => !row.hidden;
const csvOf = (table) => {
  const quote = (text) => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const head = [...table.tHead.rows[0].cells].map((cell) => quote(cell.dataset.key));
  const rows = [...table.tBodies[0].rows].filter(isListed);
  return [head, ...rows.map((row) => [...row.cells].map((_, at) => quote(valueOf(row, at))))].map((row) => row.join(",")).join("\n") + "\n";
};

// In a tree a row's children follow it: siblings change places together with all that is in them.
const sortTree = (rows, at, down) => {
  const groups = [];
  const top = Math.min(...rows.map((row) => Number(row.dataset.depth)));
  for (const row of rows) {
    if (Number(row.dataset.depth) === top || !groups.length) groups.push({ row, inner: [] });
    else groups[groups.length - 1].inner.push(row);
  }
  const order = sortRows(groups.map((one) => one.row), at, down);
  groups.sort((one, other) => order.indexOf(one.row) - order.indexOf(other.row));
  return groups.flatMap(({ row, inner }) => [row, ...(inner.length ? sortTree(inner, at, down) : [])]);
};

const makeSortable = (table) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const sort = button(head.textContent, () => {
      const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") !== "descending" : head.classList.contains("right");
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      table.tBodies[0].append(...(table.classList.contains("tree") ? sortTree : sortRows)(rows, at, down));
    });
    head.replaceChildren(sort);
  });
};

const searchField = (label, search) => {
  const field = element("input");
  field.type = "search";
  field.placeholder = label;
  field.setAttribute("aria-label", label);
  field.addEventListener("input", () => search(field.value.toLowerCase()));
  return field;
};

const SEARCHED_FROM = 12;
const makeTools = (table) => {
  const tools = element("div", undefined, "tools"), rows = [...table.tBodies[0].rows];
  if (rows.length >= SEARCHED_FROM) {
    const count = element("span", `${rows.length} rows`, "count");
    count.setAttribute("aria-live", "polite");
    const showCount = () => {
      const listed = rows.filter(isListed).length;
      count.textContent = listed < rows.length ? `${listed} of ${rows.length} rows` : `${rows.length} rows`;
    };
    tools.append(searchField("Search these rows", (wanted) => {
      for (const row of rows) row.hidden = ![...row.cells].some((cell) => `${cell.textContent} ${cell.title}`.toLowerCase().includes(wanted));
      table.classList.toggle("searched", wanted !== "");
      showCount();
    }), count);
    // When every section has followed the choice.
    document.addEventListener("profkit:module-shown", showCount);
  }
  const copy = button("Copy as CSV", () => copyText(csvOf(table), copy));
  tools.append(copy);
  table.closest(".scroll").before(tools);
};

// A chosen module stands at the foot of the window, wherever the reader is.
const chosen = { row: null, bar: element("div", undefined, "chosen") };
const chooseModule = (row) => {
  for (const one of [chosen.row, row]) if (one) one.setAttribute("aria-selected", String(one === row));
  chosen.row = row;
  const name = row ? row.cells[0].dataset.value : "";
  chosen.bar.replaceChildren(...(row ? [element("span", `Only ${name} in the timeline, memory and kernels`), button("Show all", () => chooseModule(null))] : []));
  document.dispatchEvent(new CustomEvent("profkit:module", { detail: name }));
  document.dispatchEvent(new Event("profkit:module-shown"));
};
chosen.bar.setAttribute("role", "status");
document.body.append(chosen.bar);

// What shows the whole run is hidden while a module is chosen, and holds nothing of it.
const replace = (id, ...shown) => {
  const whole = byId(id);
  if (!whole) return;
  whole.hidden = shown.length > 0;
  if (whole.nextElementSibling?.className === "choice-of-module") whole.nextElementSibling.remove();
  if (!shown.length) return;
  const holder = element("div", undefined, "choice-of-module");
  holder.append(...shown);
  whole.after(holder);
};

// A module's name without its numbers, as rows that differ in a number are one.
const kindOf = (name) => name.replace(/(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<!\d)\d+$/g, "*");

// Rows of a tree fold, and a module's name chooses what the sections below show.
const OPEN_TO = 3;
const makeTree = (table) => {
  const body = table.tBodies[0], closed = new Set();
  const depthOf = (row) => Number(row.dataset.depth);
  const innerOf = (row) => {
    const found = [];
    for (let next = row.nextElementSibling; next && depthOf(next) > depthOf(row); next = next.nextElementSibling) found.push(next);
    return found;
  };
  const show = () => {
    let under = Infinity;
    for (const row of body.rows) {
      if (depthOf(row) <= under) under = Infinity;
      row.classList.toggle("folded", under !== Infinity);
      if (under === Infinity && closed.has(row)) under = depthOf(row);
    }
  };
  for (const row of [...body.rows]) {
    const cell = row.cells[0], name = cell.dataset.value, times = cell.querySelector(".times");
    const choose = button(cell.firstChild.textContent.trim(), () => chooseModule(chosen.row === row ? null : row));
    choose.title = `Show ${name} in the sections below`;
    const inner = innerOf(row);
    const fold = inner.length ? button("▾", () => {
      if (!closed.delete(row)) closed.add(row);
      fold.textContent = closed.has(row) ? "▸" : "▾";
      fold.setAttribute("aria-expanded", String(!closed.has(row)));
      show();
    }) : element("span", "");
    fold.className = "fold";
    if (inner.length) {
      fold.setAttribute("aria-label", `Fold ${name}`);
      fold.setAttribute("aria-expanded", "true");
      if (depthOf(row) >= OPEN_TO) fold.click();
    }
    cell.replaceChildren(fold, choose, ...(times ? [" ", times] : []));
  }
  show();
};

// Times and counts as the tables have them: four digits in the unit that fits.
const fourDigits = (value) => {
  const [digits] = [[3, 10], [2, 100], [1, 1000]].find(([digits, limit]) => Number(Math.abs(value).toFixed(digits)) < limit) || [0];
  // Python rounds a tie to the even digit, and the texts of the page are Python's.
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven" });
};
const formatNs = (ns) => {
  if (Math.abs(ns) < 1000) return `${Math.round(ns)} ns`;
  for (const [size, unit] of [[1e3, "µs"], [1e6, "ms"]]) if (Number((Math.abs(ns) / size).toFixed(1)) < 1000) return `${fourDigits(ns / size)} ${unit}`;
  return `${fourDigits(ns / 1e9)} s`;
};
const formatBytes = (value) => {
  for (const power of [40, 30, 20, 10]) if (Math.abs(value) >= 1000 * 2 ** (power - 10)) return `${fourDigits(value / 2 ** power)} ${{ 40: "T", 30: "G", 20: "M", 10: "K" }[power]}iB`;
  return `${value} B`;
};
const formatShare = (value) => value > 0 && value < 0.0005 ? "<0.1%" : value >= 0.9995 && value < 1 - 1e-9 ? ">99.9%" : `${(100 * value).toFixed(1)}%`;

// Columns are [key, heading, how a number reads]; a cell's exact value is what a row holds, or the first of [value, text].
const makeTable = (name, columns, rows) => {
  const table = element("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  table.dataset.table = name;
  for (const [key, heading, show] of columns) {
    const cell = element("th", heading, show && "right");
    cell.scope = "col";
    cell.dataset.key = key;
    head.append(cell);
  }
  for (const row of rows) {
    const line = body.insertRow();
    columns.forEach(([, , show], at) => {
      const [value, text] = Array.isArray(row[at]) ? row[at] : [row[at], show ? show(row[at]) : row[at]];
      const cell = element("td", text, show && "right");
      cell.dataset.value = value;
      if (value !== text && !show) cell.title = value;
      line.append(cell);
    });
  }
  const scroll = element("div", undefined, "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.append(table);
  const holder = element("div");
  holder.append(scroll);
  makeSortable(table);
  makeTools(table);
  return holder;
};

for (const table of document.querySelectorAll("table[data-table]")) {
  if (table.classList.contains("tree")) makeTree(table);
  makeSortable(table);
  makeTools(table);
}
for (const holder of document.querySelectorAll(".copied")) {
  const code = holder.querySelector("code");
  const copy = button("Copy", () => copyText(code.textContent, copy));
  copy.setAttribute("aria-label", `Copy ${code.textContent}`);
  holder.append(copy);
}

// A section is open when a link leads to it, and all are on paper.
const folds = [...document.querySelectorAll("details")];
const openTarget = () => {
  for (let node = location.hash && byId(location.hash.slice(1)); node; node = node.parentElement) {
    const fold = node.matches("details") ? node : node.querySelector(":scope > details");
    if (fold) fold.open = true;
  }
};
addEventListener("hashchange", openTarget);
openTarget();
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => setTimeout(openTarget));
let closed = [];
addEventListener("beforeprint", () => { closed = folds.filter((fold) => !fold.open); for (const fold of closed) fold.open = true; });
addEventListener("afterprint", () => { for (const fold of closed) fold.open = false; });
return { byId, element, button, copyText, unpack, searchField, csvOf, makeTable, replace, kindOf, formatNs, formatBytes, formatShare, fourDigits, started: [] };
})();
window.profkit = profkit;
