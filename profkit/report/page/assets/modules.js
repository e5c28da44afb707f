"use strict";
// A chosen module: its kernels take the place of those of the whole run.
profkit.started.push((async () => {
const { element, makeTable, replace, formatNs, formatShare } = profkit;
const data = await profkit.unpack("modules-data");
if (!data) return;

const text = (number) => data.texts[number];
const per = data.steps || 1, each = data.steps ? " per step" : "";
const showNs = (ns) => formatNs(Math.round(ns / per));
const showCount = (count) => count % per ? (count / per).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) : (count / per).toLocaleString("en");
const quote = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;

const kernelsOf = (module) => {
  const rows = data.modules[module] || [];
  const sums = [3, 4, 5, 6].map((at) => rows.reduce((sum, row) => sum + row[at], 0)), whole = sums.reduce((a, b) => a + b);
  if (!rows.length) return [element("p", `No kernel ran in ${module}.`, "unknown")];
  const command = `profkit kernels ${data.run} --range ${quote(module)}${data.exclude ? ` --exclude ${quote(data.exclude)}` : ""}`;
  const line = element("p", `${module}: ${showNs(whole)} of kernels${each}, ${whole.toLocaleString("en")} ns in all${data.steps ? ` ${data.steps} steps` : ""}. `, "note");
  line.append(element("code", command), data.forward_alone ? " prints its forward pass." : "");
  const parts = [["forward_ns", "forward", showNs, 3], ["backward_ns", "backward", showNs, 4], ["recompute_ns", "recompute", showNs, 5], ["inference_ns", "inference", showNs, 6]].filter((one) => one[3] < 5 || sums[one[3] - 3]);
  const columns = [["share", "share", formatShare], ["total_ns", data.steps ? "per step" : "total", showNs], ...parts, ["count", "times", showCount], ["category", "category"], ["name", "kernel"]];
  return [line, makeTable("module-kernels", columns, rows.map((row) => {
    const total = row[3] + row[4] + row[5] + row[6];
    return [total / (whole || 1), total, ...parts.map((part) => row[part[3]]), row[7], text(row[2]), [text(row[0]), text(row[1])]];
  }))];
};

document.addEventListener("profkit:module", ({ detail: module }) => replace("kernels-whole", ...(module ? kernelsOf(module) : [])));
})());
