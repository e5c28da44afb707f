"use strict";
// A chosen module: its lines and categories take the place of those of all memory.
profkit.started.push((async () => {
const { element, makeTable, replace, kindOf, formatBytes, formatShare } = profkit;
const data = await profkit.unpack("memory-chosen");
if (!data) return;

const SIZES = [["bytes", "bytes", formatBytes], ["share", "share of the module", formatShare]];
const tableOf = (module, name, rows, columns) => rows.length ? makeTable(name, columns, rows) : element("p", `${module} held nothing.`, "unknown");
const rowsOf = (all, module) => {
  const rows = all[kindOf(module)] || [], whole = rows.reduce((sum, row) => sum + row[1], 0);
  return rows.map(([text, bytes, count]) => [data.texts[text], bytes, bytes / whole, count]);
};
const linesOf = (module) => tableOf(module, "module-lines", rowsOf(data.lines, module).map(([label, bytes, share, count]) => [bytes, share, count, label]),
  [...SIZES, ["count", "count", String], ["label", "your line ← called from"]]);
const categoriesOf = (module) => tableOf(module, "module-categories", rowsOf(data.categories, module).map((row) => row.slice(0, 3)), [["category", "category"], ...SIZES]);

document.addEventListener("profkit:module", ({ detail: module }) => {
  replace("memory-line-whole", ...(module ? [linesOf(module)] : []));
  replace("memory-category-whole", ...(module ? [categoriesOf(module)] : []));
});
})());
