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

const csvOf = (table) => {
  const quote = (text) => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const head = [...table.tHead.rows[0].cells].map((cell) => quote(cell.dataset.key));
  const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  return [head, ...rows.map((row) => [...row.cells].map((_, at) => quote(valueOf(row, at))))].map((row) => row.join(",")).join("\n") + "\n";
};

const makeSortable = (table) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const sort = button(head.textContent, () => {
      const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") !== "descending" : head.classList.contains("right");
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...sortRows([...table.tBodies[0].rows], at, down));
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
    tools.append(searchField("Search these rows", (wanted) => {
      for (const row of rows) row.hidden = ![...row.cells].some((cell) => `${cell.textContent} ${cell.title}`.toLowerCase().includes(wanted));
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    }), count);
  }
  const copy = button("Copy as CSV", () => copyText(csvOf(table), copy));
  tools.append(copy);
  table.closest(".scroll").before(tools);
};

for (const table of document.querySelectorAll("table[data-table]")) {
  makeSortable(table);
  makeTools(table);
}
const command = byId("command");
if (command) {
  const copy = button("Copy", () => copyText(command.textContent, copy));
  copy.setAttribute("aria-label", "Copy the command");
  command.parentElement.append(copy);
}
return { byId, element, button, copyText, unpack, searchField, csvOf, started: [] };
})();
window.profkit = profkit;
