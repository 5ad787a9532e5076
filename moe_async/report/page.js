"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const state = { learner: 0, piece: 0, layer: 0 };
// Okabe and Ito's colours and dashes, so that lines differ without colour too.
const LINES = [["#0072b2", ""], ["#e69f00", "6 3"], ["#009e73", "2 3"], ["#cc79a7", "8 3 2 3"], ["#56b4e9", ""], ["#d55e00", "6 3"]];
const LINES_IN_DARK = [LINES[4], LINES[1], LINES[2], LINES[3], LINES[0], LINES[5]];
const BELOW = [33, 102, 172], ABOVE = [217, 95, 2];
const SHARES = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [203, 186, 105], [255, 234, 70]];

const dark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const mix = (from, to, part) => from.map((value, place) => Math.round(value + (to[place] - value) * part));
const rgb = (colour) => `rgb(${colour.join(",")})`;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => (isNumber(value) ? value.toFixed(digits) : "-");
const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : "-");
const view = () => data.learners[state.learner];

// Loads: blue is less than a fair share, orange more, each doubling one step; a cross is no load at all.
function loadColour(value) {
  const part = Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-9)) / 2));
  return rgb(mix(dark() ? [64, 64, 70] : [242, 242, 242], part < 0 ? BELOW : ABOVE, Math.abs(part)));
}

function shareColour(most) {
  return (value) => {
    const place = Math.min(value / (most || 1), 1) * (SHARES.length - 1), low = Math.min(Math.floor(place), SHARES.length - 2);
    return rgb(mix(SHARES[low], SHARES[low + 1], place - low));
  };
}

function showTip(event, text) {
  const tip = at("tip");
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 260)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

// Neighbours that share a cell, of which the busiest is shown: a screen has fewer points than a layer may have experts.
function packed(rows, size) {
  if (size === 1) return rows;
  return rows.map((row) => Array.from({ length: Math.ceil(row.length / size) }, (_, place) => {
    const known = row.slice(place * size, (place + 1) * size).filter((value) => value !== null);
    return known.length ? Math.max(...known) : null;
  }));
}

// A canvas with a row for each label and a cell for each value; rows may differ in length.
function heat(canvas, labels, given, colour, crossed, tell) {
  const ratio = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  const drawing = canvas.getContext("2d");
  drawing.font = "12px system-ui, sans-serif";
  const margin = Math.ceil(Math.max(0, ...labels.map((label) => drawing.measureText(label).width))) + 8;
  const shared = Math.max(1, Math.ceil((2 * Math.max(...given.map((row) => row.length))) / Math.max(width - margin, 1)));
  const rows = packed(given, shared);
  const most = Math.max(1, ...rows.map((row) => row.length));
  const across = Math.max(Math.min((width - margin) / most, 48), 1), down = Math.max(Math.min(900 / Math.max(rows.length, 1), 22), 6);
  const height = down * rows.length + 18;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  drawing.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawing.clearRect(0, 0, width, height);
  drawing.font = `${Math.min(12, down)}px system-ui, sans-serif`;
  drawing.textBaseline = "middle";
  const gap = across > 5 ? 1 : 0;
  rows.forEach((row, y) => {
    drawing.fillStyle = css("--ink");
    if (down > 8 || y % 2 === 0) drawing.fillText(labels[y], 0, (y + 0.5) * down);
    row.forEach((value, x) => {
      if (value === null) return;
      const left = margin + x * across, top = y * down;
      drawing.fillStyle = colour(value);
      drawing.fillRect(left, top, across - gap, down - (down > 8 ? 1 : 0));
      if (crossed && value === 0) {
        drawing.strokeStyle = css("--ink");
        drawing.beginPath();
        drawing.moveTo(left + across * 0.3, top + down * 0.3);
        drawing.lineTo(left + across * 0.7, top + down * 0.7);
        drawing.moveTo(left + across * 0.7, top + down * 0.3);
        drawing.lineTo(left + across * 0.3, top + down * 0.7);
        drawing.stroke();
      }
    });
  });
  drawing.fillStyle = css("--faint");
  drawing.font = "11px system-ui, sans-serif";
  const every = Math.max(1, Math.ceil(26 / across));
  for (let x = 0; x < most; x += every) drawing.fillText(String(x * shared), margin + x * across + 1, height - 8);
  canvas.onmousemove = (event) => {
    const x = Math.floor((event.offsetX - margin) / across), y = Math.floor(event.offsetY / down);
    const value = rows[y] && x >= 0 ? rows[y][x] : undefined;
    showTip(event, value === undefined || value === null ? "" : tell(labels[y], x * shared, value) + (shared > 1 ? `\n(the busiest of ${shared} from there on)` : ""));
  };
  canvas.onmouseleave = (event) => showTip(event, "");
}

function legends() {
  for (const place of document.querySelectorAll(".legend")) {
    const loads = place.dataset.scale === "load";
    place.replaceChildren();
    const canvas = document.createElement("canvas");
    canvas.width = 180;
    canvas.height = 12;
    const drawing = canvas.getContext("2d"), colour = shareColour(1);
    for (let x = 0; x < 180; x++) {
      drawing.fillStyle = loads ? loadColour(2 ** ((x / 90 - 1) * 2)) : colour(x / 180);
      drawing.fillRect(x, 0, 1, 12);
    }
    place.append(loads ? "a quarter" : "0", canvas, loads ? "four times, or more; grey is one; a cross is none" : "the largest");
  }
}

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function ticks(low, high, number, least) {
  const rough = Math.max((high - low || 1) / number, least), power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  const size = [5, 2, 1].map((one) => one * power).find((one) => one <= rough * (1 + 1e-9));
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-6; value += size) found.push([value, tickText(value, size)]);
  return found;
}

// As many digits as tell one tick from the next.
const tickText = (value, size) => value.toFixed(Math.max(0, -Math.floor(Math.log10(size) + 1e-9)));
const exact = (value) => String(Number(value.toPrecision(7)));

// Lines over x with labelled axes.
function chart(parent, title, xLabel, series) {
  const shown = series.map((one) => ({ ...one, points: one.x.map((x, place) => [x, one.y[place]]).filter(([, y]) => isNumber(y)) })).filter((one) => one.points.length);
  if (!shown.length) return;
  const box = document.createElement("div");
  box.className = "chart";
  parent.append(box);
  const width = 480, height = 230, left = 56, right = 10, top = 26, bottom = 40 + 16 * Math.ceil(shown.length / 3);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": title }, box);
  const xs = shown.flatMap((one) => one.points.map(([x]) => x)), ys = shown.flatMap((one) => one.points.map(([, y]) => y));
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - Math.abs(low) * 0.1 - 0.1, high + Math.abs(high) * 0.1 + 0.1];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const toX = (x) => left + ((x - first) / (last - first || 1)) * (width - left - right);
  const toY = (y) => height - bottom - ((y - low) / (high - low)) * (height - top - bottom);
  element("text", { x: left, y: 14, "font-weight": 600 }, svg, title);
  for (const [y, text] of ticks(low, high, 4, 0)) {
    element("line", { x1: left, x2: width - right, y1: toY(y), y2: toY(y), class: "axis" }, svg);
    element("text", { x: left - 6, y: toY(y) + 4, "text-anchor": "end", class: "faint" }, svg, text);
  }
  for (const [x, text] of ticks(first, last, 6, 1)) element("text", { x: toX(x), y: height - bottom + 15, "text-anchor": "middle", class: "faint" }, svg, text);
  element("text", { x: width - right, y: height - bottom + 29, "text-anchor": "end", class: "faint" }, svg, xLabel);
  shown.forEach((one, place) => {
    const [colour, dash] = (dark() ? LINES_IN_DARK : LINES)[place % LINES.length];
    const path = one.points.map(([x, y], number) => `${number ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
    element("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }, svg);
    if (one.points.length < 25) for (const [x, y] of one.points) element("circle", { cx: toX(x), cy: toY(y), r: 2.2, fill: colour }, svg);
    if (shown.length > 1) {
      const x = left + (place % 3) * 140, y = height - bottom + 44 + 16 * Math.floor(place / 3);
      element("line", { x1: x, x2: x + 22, y1: y - 4, y2: y - 4, stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }, svg);
      element("text", { x: x + 27, y }, svg, one.name);
    }
  });
  svg.onmousemove = (event) => {
    const x = first + ((event.offsetX * (width / svg.clientWidth) - left) / (width - left - right)) * (last - first);
    const told = shown.map((one) => one.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)));
    showTip(event, told.map(([px, y], place) => `${shown[place].name} at ${xLabel} ${exact(px)}: ${exact(y)}`).join("\n"));
  };
  svg.onmouseleave = (event) => showTip(event, "");
}

function table(place, head, rows) {
  place.replaceChildren();
  const top = place.createTHead().insertRow();
  for (const name of head) top.append(Object.assign(document.createElement("th"), { textContent: name }));
  const body = place.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.insertCell().textContent = cell;
  }
}

function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name, place) => new Option(name, place)));
  select.value = chosen;
}

function drawHead() {
  const { summary, structure } = view();
  at("name").textContent = data.name;
  const recorded = `steps ${summary.recorded[0]} to ${summary.recorded[1]}`;
  at("facts").textContent = [structure.title, recorded].filter(Boolean).join("; ");
  at("left-out").textContent = data.left_out.length ? `Not shown, because nothing is recorded yet: ${data.left_out.join(", ")}.` : "";
  at("learner-label").style.display = data.learners.length > 1 ? "" : "none";
}

function drawVerdicts() {
  const found = view().verdicts;
  at("verdicts").replaceChildren(...(found.length ? found.map((one) => one.line) : ["no known disease of routing"]).map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    if (!found.length) item.className = "healthy";
    return item;
  }));
}

const HEAD = ["layer", "max/mean", "cv", "MaxVio", "micro", "effective", "dead", "starved", "dropped", "top-1", "drift", "ranks"];

function drawSummary() {
  const { summary } = view();
  at("summary-steps").textContent = `Steps ${summary.first_step} to ${summary.last_step}, the layers with the most uneven loads first.`;
  const worst = [...summary.layers].sort((one, other) => other.max_over_mean - one.max_over_mean);
  table(at("summary"), HEAD, worst.map((layer) => [
    layer.layer, fixed(layer.max_over_mean, 2), fixed(layer.cv, 2), fixed(layer.violation, 2), fixed(layer.micro_violation, 2),
    `${fixed(layer.effective_experts, 1)}/${layer.experts}`, layer.dead.length, layer.starved.length, percent(layer.drop_rate),
    fixed(layer.confidence, 3), fixed(layer.drift, 3), fixed(layer.step_imbalance, 2),
  ]));
}

// Behind the experts stand those that give a token back as it is.
const expertName = (layer, place) => (place < view().experts[layer] ? `expert ${place}` : `zero expert ${place - view().experts[layer]}`);
const range = (piece) => (piece.first === piece.last ? String(piece.first) : `${piece.first} to ${piece.last}`);

function drawPiece() {
  const { layers, pieces } = view(), piece = pieces[state.piece];
  at("piece").max = pieces.length - 1;
  at("piece").value = state.piece;
  at("piece-steps").textContent = range(piece);
  heat(at("layers"), layers, piece.loads, loadColour, true, (label, expert, load) => {
    const place = layers.indexOf(label);
    return `${label}, ${expertName(place, expert)}: ${fixed(load, 2)} of a fair share\nmax/mean ${fixed(piece.max_over_mean[place], 2)}, dropped ${percent(piece.drop_rate[place])}`;
  });
  drawStructure();
}

function drawStructure() {
  const { structure, pieces, flows, sampled_tokens } = view(), piece = pieces[state.piece];
  at("structure-note").textContent = `Experts are coloured by their loads in steps ${range(piece)}. Lines join the experts that ${sampled_tokens} sampled tokens of the whole run took in one layer and the next; the thicker, the more.`;
  const place = at("structure");
  place.replaceChildren();
  const width = Math.max(place.clientWidth - 24, 600), left = 300, down = 96, boxed = 66;
  const svg = element("svg", { viewBox: `0 0 ${width} ${structure.blocks.length * down}`, width, height: structure.blocks.length * down, role: "img", "aria-label": "blocks of the model and ways through their experts" }, place);
  const ways = element("g", {}, svg);
  const where = [];
  structure.blocks.forEach((block, number) => {
    const top = number * down + 4;
    element("rect", { x: 2, y: top, width: left - 30, height: boxed, rx: 6, fill: "none", stroke: css("--line") }, svg);
    const title = element("text", { x: 12, y: top + 16, "font-weight": 600 }, svg, block.title.length > 36 ? `…${block.title.slice(-35)}` : block.title);
    element("title", {}, title, block.title);
    block.lines.forEach((line, row) => element("text", { x: 12, y: top + 30 + 13 * row, class: "faint", "font-size": 11 }, svg, line));
    if (number) element("line", { x1: left / 2, x2: left / 2, y1: top - down + boxed, y2: top, class: "axis", "stroke-width": 2 }, svg);
    if (block.layer === null) return;
    const loads = piece.loads[block.layer], across = (width - left - 8) / loads.length;
    where[block.layer] = { top, across };
    loads.forEach((load, expert) => {
      const cell = element("rect", { x: left + expert * across, y: top + 8, width: Math.max(across - 1.5, 0.5), height: 40, fill: loadColour(load) }, svg);
      element("title", {}, cell, `${block.title}, ${expertName(block.layer, expert)}: ${fixed(load, 2)} of a fair share`);
      if (across > 22) element("text", { x: left + (expert + 0.5) * across, y: top + 32, "text-anchor": "middle" }, svg, String(expert));
    });
  });
  flows.forEach((flow, layer) => {
    const from = where[layer], to = where[layer + 1];
    if (!from || !to || !flow.length) return;
    const most = flow[0][2];
    for (const [one, other, share] of flow) {
      const x1 = left + (one + 0.5) * from.across, x2 = left + (other + 0.5) * to.across, y1 = from.top + 48, y2 = to.top + 8, middle = (y1 + y2) / 2;
      const line = element("path", { d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`, fill: "none", stroke: css("--accent"), "stroke-width": 0.5 + 4 * share / most, opacity: 0.15 + 0.6 * share / most }, ways);
      element("title", {}, line, `${expertName(layer, one)} then ${expertName(layer + 1, other)}: ${percent(share)} of the ways`);
    }
  });
}

function drawLayer() {
  const { layers, pieces, specialisation } = view(), name = layers[state.layer];
  heat(at("over-time"), pieces.map(range), pieces.map((piece) => piece.loads[state.layer]), loadColour, true, (label, expert, load) => `steps ${label}, ${expertName(state.layer, expert)}: ${fixed(load, 2)} of a fair share`);
  const found = specialisation.layers[state.layer], source = specialisation.of === "training" ? "in training" : `of ${specialisation.of}`;
  const domains = specialisation.domains, known = domains.length > 0;
  const information = found.information;
  let told = known ? `Share of each domain's assignments that each expert gets, ${source}.` : "The text has no labels.";
  if (information) {
    told += ` Expert and domain share ${fixed(information.bits, 4)} bits`;
    told += isNumber(information.baseline) ? `; by chance ${fixed(information.baseline, 4)} ± ${fixed(information.spread, 4)}.` : "; expert_load profile tells what chance alone would give.";
  }
  at("domain-note").textContent = told;
  at("domain-legend").style.display = at("domains").style.display = known ? "" : "none";
  const most = Math.max(0, ...found.domain_shares.flat());
  if (known) heat(at("domains"), domains, found.domain_shares, shareColour(most), false, (label, expert, share) => `${label}, ${expertName(state.layer, expert)}: ${percent(share)}`);
  drawPreferred(found.preferred);
  drawPairs(found, specialisation);
  drawRankLoads(name);
}

function drawPreferred(preferred) {
  at("preferred").replaceChildren();
  if (!preferred) return;
  const made = document.createElement("table");
  at("preferred").append(made);
  table(made, ["expert", "tokens that tell it from the others, and how many times as often as by chance"], preferred.map((tokens, expert) => [expertName(state.layer, expert), tokens.map((one) => `${one.text} x${fixed(one.lift, 1)}`).join("   ")]));
}

function drawPairs(found, specialisation) {
  const matrix = found.coactivation, tokens = specialisation.tokens.toLocaleString("en");
  at("pair-legend").style.display = at("pairs").style.display = matrix ? "" : "none";
  let told = `How many times as often as by chance two experts serve the same token; from ${tokens} tokens. Blank: nothing to tell.`;
  if (found.one_expert) told = "Each token takes one expert.";
  else if (!specialisation.tokens) told = "No paths of tokens were sampled.";
  at("pair-note").textContent = told;
  if (matrix) heat(at("pairs"), matrix.map((_, expert) => expertName(state.layer, expert)), matrix, loadColour, true, (label, other, lift) => `${label} and ${expertName(state.layer, other)}: ${fixed(lift, 2)} times chance`);
  at("strongest").textContent = found.strongest.slice(0, 8).map((pair) => `${pair.first} and ${pair.second}: x${fixed(pair.lift, 2)} (${pair.count} tokens)`).join("; ");
}

function drawRankLoads() {
  const { pieces, rank_loads, ranks } = view();
  const shown = rank_loads !== null;
  for (const id of ["rank-title", "rank-legend", "ranks"]) at(id).style.display = shown ? "" : "none";
  if (shown) heat(at("ranks"), pieces.map(range), rank_loads.by_piece.map((piece) => piece[state.layer]), loadColour, true, (label, rank, load) => `steps ${label}, rank ${rank} (experts ${ranks[rank].join(", ")}): ${fixed(load, 2)} of the mean`);
}

function drawCurves() {
  const { losses, rank_loads, rank_cost, pieces } = view();
  at("losses").replaceChildren();
  for (const [name, values] of Object.entries(losses.balance)) chart(at("losses"), `${name} loss`, "step", [{ name, x: losses.steps, y: values }]);
  if (losses.others.lm_loss) chart(at("losses"), "language-model loss, nats per token", "step", [{ name: "loss", x: losses.steps, y: losses.others.lm_loss }]);
  if (losses.others.tokens_per_second) chart(at("losses"), "tokens per second", "step", [{ name: "tokens/s", x: losses.steps, y: losses.others.tokens_per_second }]);
  at("rank-charts").replaceChildren();
  at("rank-cost").textContent = rank_cost
    ? `The busiest rank has ${fixed(rank_cost.step_imbalance, 2)} times the mean load in a step. Estimated cost: ${fixed(1000 * rank_cost.lost_seconds, 0)} ms of a step of ${fixed(rank_cost.step_seconds, 2)} s (${percent(rank_cost.lost_share)}), if experts take as large a share of the time as of the operations (${percent(rank_cost.experts_share)}).`
    : "What uneven ranks cost is not known: the record has no ranks, or no times.";
  if (!rank_loads) return;
  const x = pieces.map((piece) => piece.last);
  const worst = rank_loads.step_imbalance.map((layers) => Math.max(...layers)), mean = rank_loads.step_imbalance.map((layers) => layers.reduce((one, other) => one + other, 0) / layers.length);
  chart(at("rank-charts"), "load of the busiest rank over the mean, of a step", "step", [{ name: "worst layer", x, y: worst }, { name: "mean of the layers", x, y: mean }]);
}

function drawStaleness() {
  const found = data.staleness;
  at("staleness-section").style.display = found ? "" : "none";
  if (!found) return;
  table(at("staleness"), ["learner", "updates", ...found.kinds.flatMap((kind) => [`${kind}, mean`, `${kind}, most`])], found.learners.map((one) => [`learner ${one.learner}`, one.updates, ...found.kinds.flatMap((_, kind) => [fixed(one.mean[kind], 2), one.max[kind]])]));
  at("staleness-charts").replaceChildren();
  found.kinds.forEach((kind, place) => chart(at("staleness-charts"), `${kind} of merged updates`, "merge", found.learners.map((one) => ({ name: `learner ${one.learner}`, x: one.merge, y: one.values[place] }))));
}

function drawAll() {
  legends();
  drawHead();
  drawVerdicts();
  drawSummary();
  drawPiece();
  drawLayer();
  drawCurves();
  drawStaleness();
}

function choose(learner) {
  state.learner = learner;
  state.piece = view().pieces.length - 1;
  state.layer = Math.min(state.layer, view().layers.length - 1);
  fill(at("layer"), view().layers, state.layer);
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
fill(at("learner"), data.learners.map((one) => one.name), 0);
choose(0);
drawAll();
at("learner").onchange = (event) => { choose(Number(event.target.value)); drawAll(); };
at("layer").onchange = (event) => { state.layer = Number(event.target.value); drawLayer(); };
at("piece").oninput = (event) => { state.piece = Number(event.target.value); drawPiece(); };
at("theme").onclick = () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; drawAll(); };
addEventListener("resize", drawAll);
