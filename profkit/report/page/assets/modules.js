"use strict";
// A chosen module: its kernels, lines and categories take the place of those of the whole run.
profkit.started.push((async () => {
const { byId, element, makeTable, formatNs, formatBytes, formatShare } = profkit;
const data = await profkit.unpack("modules-data");
if (!data) return;

const text = (number) => data.texts[number];
const per = data.steps || 1, each = data.steps ? " per step" : "";
const showNs = (ns) => formatNs(Math.round(ns / per));
const showCount = (count) => count % per ? (count / per).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) : (count / per).toLocaleString("en");
const quote = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;

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

const kernelsOf = (module) => {
  const rows = data.kernels.modules[module] || [];
  const sums = [3, 4, 5, 6].map((at) => rows.reduce((sum, row) => sum + row[at], 0)), whole = sums.reduce((a, b) => a + b);
  if (!rows.length) return [element("p", `No kernel ran in ${module}.`, "unknown")];
  const command = `profkit kernels ${data.run} --range ${quote(module)}${data.kernels.exclude ? ` --exclude ${quote(data.kernels.exclude)}` : ""}`;
  const line = element("p", `${module}: ${showNs(whole)} of kernels${each}, ${whole.toLocaleString("en")} ns in all${data.steps ? ` ${data.steps} steps` : ""}. `, "note");
  line.append(element("code", command), data.kernels.forward_alone ? " prints its forward pass." : "");
  const parts = [["forward_ns", "forward", showNs, 3], ["backward_ns", "backward", showNs, 4], ["recompute_ns", "recompute", showNs, 5], ["inference_ns", "inference", showNs, 6]].filter((one) => one[3] < 5 || sums[one[3] - 3]);
  const columns = [["share", "share", formatShare], ["total_ns", data.steps ? "per step" : "total", showNs], ...parts, ["count", "times", showCount], ["category", "category"], ["name", "kernel"]];
  return [line, makeTable("module-kernels", columns, rows.map((row) => {
    const total = row[3] + row[4] + row[5] + row[6];
    return [total / (whole || 1), total, ...parts.map((part) => row[part[3]]), row[7], text(row[2]), [text(row[0]), text(row[1])]];
  }))];
};

const tableOf = (module, name, rows, columns) => rows && rows.length ? makeTable(name, columns, rows) : element("p", `${module} held nothing.`, "unknown");
const SIZES = [["bytes", "bytes", formatBytes], ["share", "share of the module", formatShare]];
const linesOf = (module) => {
  const rows = data.memory.lines[module] || [], whole = rows.reduce((sum, row) => sum + row[1], 0);
  return tableOf(module, "module-lines", rows.map(([label, bytes, count]) => [bytes, bytes / whole, count, text(label)]), [...SIZES, ["count", "count", String], ["label", "your line ← called from"]]);
};
const categoriesOf = (module) => {
  const rows = data.memory.categories[module] || [], whole = rows.reduce((sum, row) => sum + row[1], 0);
  return tableOf(module, "module-categories", rows.map(([category, bytes]) => [text(category), bytes, bytes / whole]), [["category", "category"], ...SIZES]);
};

document.addEventListener("profkit:module", ({ detail: module }) => {
  if (data.kernels) replace("kernels-whole", ...(module ? kernelsOf(module) : []));
  if (!data.memory) return;
  replace("memory-line-whole", ...(module ? [linesOf(module)] : []));
  replace("memory-category-whole", ...(module ? [categoriesOf(module)] : []));
});
})());
