"use strict";
// Draws the charts of the page from the numbers in #data. Names from the user's file only ever become text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";

  const add = (parent, tag, attributes = {}, text = null) => {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const short = (name, most = 18) => (name.length > most ? name.slice(0, most - 1) + "…" : name);
  const digits = (value) => {
    const plain = Number(value.toPrecision(4));
    if (Math.abs(plain) >= 1e9) return plain.toExponential().replace("e+", "e");
    return plain.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  };
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const spaced = ([low, high, count]) => Array.from({ length: count }, (_, i) => low + ((high - low) * i) / (count - 1));

  function ticks(low, high, about, least = 0) {
    const power = 10 ** Math.ceil(Math.log10((high - low) / about));
    let found = [];
    for (const part of [1, 0.5, 0.2, 0.1]) {
      const step = Math.max(part * power, least);
      found = [];
      for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
        found.push(Number((i * step).toPrecision(12)));
      if (found.length >= 3 || step === least) return found;
    }
    return found;
  }

  // An empty chart with axes: scales x and y from data to pixels.
  function frame(host, options) {
    const { x: [x0, x1], y: [y0, y1], xName = "", yName = "", yTicks = false, xLeast = 0 } = options;
    const { height = 230, right = 12, top = 18 } = options;
    const levels = yTicks ? ticks(y0, y1, 4) : [];
    const left = Math.max(options.left ?? 12, 12 + 7 * Math.max(...levels.map((t) => digits(t).length)));
    const width = Math.max(260, host.clientWidth);
    const bottom = height - 40;
    host.replaceChildren();
    const svg = add(host, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
    const y = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - top);
    for (const t of levels) {
      add(svg, "line", { class: "rule", x1: left, x2: width - right, y1: y(t), y2: y(t) });
      add(svg, "text", { class: "tick", x: left - 6, y: y(t) + 4, "text-anchor": "end" }, digits(t));
    }
    add(svg, "line", { class: "base", x1: left, x2: width - right, y1: bottom, y2: bottom });
    for (const t of ticks(x0, x1, Math.max(3, width / 90), xLeast)) {
      add(svg, "line", { class: "base", x1: x(t), x2: x(t), y1: bottom, y2: bottom + 4 });
      add(svg, "text", { class: "tick", x: x(t), y: bottom + 17, "text-anchor": "middle" }, digits(t));
    }
    add(svg, "text", { class: "axis-name", x: width - right, y: height - 5, "text-anchor": "end" }, xName);
    if (yName) add(svg, "text", { class: "axis-name", x: 0, y: 11 }, yName);
    // where something is drawn, every few pixels: names keep off these places
    const drawn = [];
    const trace = (points) => points.forEach(([px, py], i) => {
      const [fromX, fromY] = points[Math.max(i - 1, 0)];
      const steps = Math.max(1, Math.ceil(Math.hypot(px - fromX, py - fromY) / 4));
      for (let k = 1; k <= steps; k++) drawn.push([fromX + ((px - fromX) * k) / steps, fromY + ((py - fromY) * k) / steps]);
    });
    const curve = (className, xs, ys) => {
      const points = xs.map((v, i) => [x(v), y(ys[i])]);
      trace(points);
      return add(svg, "path", { class: className, d: path(points) });
    };
    const segment = (className, x1, y1, x2, y2) => {
      trace([[x1, y1], [x2, y2]]);
      add(svg, "line", { class: className, x1, y1, x2, y2 });
    };
    const dot = (className, px, py, r) => {
      trace([[px, py], [px - r, py], [px + r, py]]);
      return add(svg, "circle", { class: className, cx: px, cy: py, r });
    };
    return { svg, x, y, width, left, bottom, top, drawn, curve, segment, dot };
  }

  // Labels in order, each where it is asked for or near it: inside the chart, on no other label, on as little as can be.
  const SHIFTS = [0, -7, 7, -14, 14, -24, 24, -36, 36, -52, 52];
  function labels(f, wanted) {
    const taken = [];
    const meets = (a, b) => a.left < b.right && a.right > b.left && a.top < b.low && a.low > b.top;
    for (const { text, className, px, py, anchor } of wanted) {
      const node = add(f.svg, "text", { class: className }, text);
      const wide = node.getComputedTextLength();
      const asked = px - wide * ({ end: 1, middle: 0.5 }[anchor] ?? 0);
      let best = null;
      for (const up of SHIFTS)
        for (const aside of SHIFTS) {
          const left = Math.min(Math.max(asked + 2 * aside, f.left - 6), f.width - wide - 2);
          const base = Math.min(Math.max(py + up, 12), Math.max(py, f.bottom - 4));
          const box = { left: left - 3, right: left + wide + 3, top: base - 12, low: base + 4, base };
          const under = f.drawn.filter(([x, y]) => x > box.left && x < box.right && y > box.top && y < box.low).length;
          box.cost = 1e4 * taken.some((other) => meets(box, other)) + 20 * under + Math.hypot(aside, up);
          if (best === null || box.cost < best.cost) best = box;
        }
      node.setAttribute("x", best.left + 3);
      node.setAttribute("y", best.base);
      taken.push(best);
    }
  }

  // Groups are named at their lines; more than four would cover each other, so these are listed above the chart.
  const listed = data.groups.length > 4;
  const listRoom = listed ? 15 * Math.ceil(data.groups.length / 2) : 0;
  function nameGroups(f, wanted, others = []) {
    if (!listed) return labels(f, [...others, ...wanted]);
    const column = f.width / 2;
    [...wanted].sort((a, b) => a.className.localeCompare(b.className)).forEach((name, i) => {
      const px = (i % 2) * column, py = f.top - 10 - listRoom + 15 * (1 + Math.floor(i / 2));
      const line = name.className.replace("name halo", "curve");
      add(f.svg, "line", { class: line, x1: px, x2: px + 26, y1: py - 4, y2: py - 4 });
      add(f.svg, "text", { class: name.className, x: px + 32, y: py }, short(name.full, Math.floor((column - 36) / 6.6)));
    });
    labels(f, others);
  }

  const groupClass = (i) => `g${i % 8}`;

  function densities(host, { grid, densities: all, means }, { peak, xName }) {
    const xs = spaced(grid);
    // one scale for all charts, unless that would flatten this one
    const own = Math.max(...all.flat()), most = Math.max(own, Math.min(peak, 2.5 * own));
    const f = frame(host, { x: [grid[0], grid[1]], y: [0, most * 1.08], xName, height: 210 + listRoom, top: 18 + listRoom });
    all.forEach((values, i) => {
      const edge = f.curve(`curve ${groupClass(i)}`, xs, values).getAttribute("d");
      const close = `L${f.x(xs.at(-1))} ${f.bottom}L${f.x(xs[0])} ${f.bottom}Z`;
      if (all.length <= 3) add(f.svg, "path", { class: `area ${groupClass(i)}`, d: edge + close });
      const at = f.x(Math.min(Math.max(means[i], grid[0]), grid[1]));
      add(f.svg, "line", { class: `mean ${groupClass(i)}`, x1: at, x2: at, y1: f.bottom, y2: f.bottom - 14 });
    });
    // The group with the lowest mean is named on the left flank, that with the highest on the right one.
    const order = means.map((_, i) => i).sort((a, b) => means[a] - means[b]);
    nameGroups(f, order.map((i, place) => {
      const values = all[i], top = values.indexOf(Math.max(...values));
      const right = place >= order.length / 2;
      const half = values[top] * (0.5 + 0.4 * Math.abs((2 * place) / (order.length - 1) - 1));
      let k = top;
      while (k > 0 && k < values.length - 1 && values[k] > half) k += right ? 1 : -1;
      const at = { px: f.x(xs[k]) + (right ? 10 : -10), py: f.y(values[k]), anchor: right ? "start" : "end" };
      return { text: short(data.groups[i]), full: data.groups[i], className: `name halo ${groupClass(i)}`, ...at };
    }));
  }

  function cumulative(host, d) {
    const f = frame(host, {
      x: [data.grid[0], data.grid[1]], y: [0, 1], yTicks: true, left: 34, top: 26 + listRoom, height: 230 + listRoom,
      xName: data.predicted, yName: "share of the group at or below",
    });
    d.shares.forEach((values, i) => f.curve(`curve ${groupClass(i)}`, d.x, values));
    const at = f.x(d.at), low = f.y(d.low), high = f.y(d.high);
    for (const v of [low, high]) f.segment("mark", at - 5, v, at + 5, v);
    f.segment("mark", at, low, at, high);
    // a group is named where its line passes a height of its own, outside the other lines
    const order = d.shares.map((_, i) => i).sort((a, b) => data.means[a] - data.means[b]);
    const apart = Math.min(0.2, 1 / order.length);
    const names = order.map((i, place) => {
      const right = place >= order.length / 2;
      const share = right ? 0.22 + apart * (order.length - 1 - place) : 0.85 - apart * place;
      const k = d.shares[i].findIndex((v) => v >= share);
      const at = { px: f.x(d.x[k]) + (right ? 10 : -10), py: f.y(share) + (right ? 10 : 0), anchor: right ? "start" : "end" };
      return { text: short(data.groups[i]), full: data.groups[i], className: `name halo ${groupClass(i)}`, ...at };
    });
    const ks = `KS ${(d.high - d.low).toFixed(3)}`;
    nameGroups(f, names, [{ text: ks, className: "halo strong", px: at - 12, py: high + 4, anchor: "end" }]);
  }

  function tradeoff(host, position) {
    const { steps, chosen, others, floor, target, refit } = data;
    const all = [...steps.map((s) => [s.ks, s.mse]), ...others];
    const right = Math.max(...all.map((p) => p[0]), target ?? 0, floor) * 1.08;
    const ys = [...all.map((p) => p[1]), ...(refit === null ? [] : [refit])];
    const room = (Math.max(...ys) - Math.min(...ys)) * 0.12 || Math.abs(ys[0]) * 0.05 || 1;
    const f = frame(host, {
      x: [0, right], y: [Math.min(...ys) - room, Math.max(...ys) + room], yTicks: true, left: 52, top: 30, height: 260,
      xName: "KS distance between the groups", yName: data.errorName,
    });
    add(f.svg, "rect", { class: "zone", x: f.x(0), width: f.x(floor) - f.x(0), y: f.top, height: f.bottom - f.top });
    if (target !== null) f.segment("dash", f.x(target), f.top, f.x(target), f.bottom);
    if (refit !== null) f.segment("dash", f.x(0), f.y(refit), f.x(right), f.y(refit));
    for (const [ks, mse] of others) f.dot("faint hollow", f.x(ks), f.y(mse), 3);
    const best = steps.slice(1).filter((s) => !s.dominated);
    f.curve("path", best.map((s) => s.ks), best.map((s) => s.mse));
    steps.forEach((s, i) => {
      const kind = `dot pick${i ? "" : " old"}${s.dominated ? " hollow" : ""}`;
      const dot = f.dot(kind, f.x(s.ks), f.y(s.mse), i === chosen || !i ? 6 : 4);
      add(dot, "title", {}, s.sentence);
      dot.addEventListener("click", () => { slider.value = i; move(); });
    });
    const now = steps[position];
    f.dot("ring", f.x(now.ks), f.y(now.mse), 8).setAttribute("data-now", position);
    const names = [], clear = Math.max(f.x(floor), f.x(0) + 84) + 10; // right of the floor and of its name
    const refitName = { text: "refit without constraint", className: "tick halo", px: clear, py: f.y(refit ?? 0) - 6 };
    if (target !== null)
      names.push({ text: `target ${digits(target)}`, className: "tick halo", px: f.x(target), py: f.top - 5, anchor: "middle" });
    names.push(
      { text: "chosen", className: "halo strong", px: f.x(steps[chosen].ks) + 12, py: f.y(steps[chosen].mse) - 10 },
      { text: "original", className: "halo strong old", px: f.x(steps[0].ks), py: f.y(steps[0].mse) - 14, anchor: "middle" },
      ...(refit === null ? [] : [refitName]),
      { text: "noise level", className: "tick", px: f.x(0) + 4, py: f.bottom - 6 },
    );
    labels(f, names);
  }

  function ratios(host) {
    const f = frame(host, {
      x: [0, 1], y: [0, 1], yTicks: true, left: 34, top: 26, xName: "share of all people selected", yName: "lowest adverse-impact ratio",
    });
    f.segment("dash", f.x(0), f.y(0.8), f.x(1), f.y(0.8));
    const names = data.ratios.map((points, i) => {
      const kind = i ? "new" : "old";
      f.curve(`mark line ${kind}`, points.map((p) => p[0]), points.map((p) => p[1]));
      const [at, ratio] = points[Math.floor(points.length * 0.35)];
      const text = i ? "chosen model" : "original model";
      return { text, className: `halo strong ${kind}`, px: f.x(at) + 6, py: f.y(ratio) + (i ? -10 : 20) };
    });
    labels(f, [{ text: "0.8", className: "tick halo", px: f.x(1) - 2, py: f.y(0.8) - 5, anchor: "end" }, ...names.reverse()]);
  }

  function spectrum(host) {
    const { before, after, afterName } = data.spectrum;
    const count = Math.max(before.length, after.length);
    const f = frame(host, {
      x: [0.4, count + 0.6], y: [0, Math.max(...before, ...after) * 1.08], yTicks: true, xLeast: 1, left: 46, top: 26,
      xName: "direction, the largest first", yName: "singular value σ",
    });
    for (const [values, name] of [[before, "old"], [after, "new"]]) {
      const at = values.map((_, i) => i + 1);
      f.curve(`mark ${name}`, at, values).style.fill = "none";
      values.forEach((v, i) => f.dot(name, f.x(i + 1), f.y(v), 2.5));
    }
    const place = Math.min(count - 1, Math.max(1, Math.round(count / 6)));
    labels(f, [
      { text: "before", className: "halo strong old", px: f.x(place + 1) + 8, py: f.y(before[place]) - 10 },
      { text: afterName, className: "halo strong new", px: f.x(1) + 6, py: f.y(after[0]) - 8 },
    ]);
  }

  function layers(host) {
    const found = data.layers;
    const width = Math.max(260, host.clientWidth), left = Math.min(150, width / 3), row = 30;
    const right = Math.max(data.layersBefore, ...found.map((l) => l.high ?? 0)) * 1.08;
    const height = found.length * row + 62;
    const f = frame(host, { x: [0, right], y: [0, found.length], height, left, top: 22, xName: "KS distance if this layer is edited" });
    const now = f.x(data.layersBefore);
    add(f.svg, "line", { class: "dash", x1: now, x2: now, y1: f.top, y2: f.bottom });
    add(f.svg, "text", { class: "tick halo", x: now, y: 12, "text-anchor": "end" }, `as it is ${data.layersBefore.toFixed(3)}`);
    found.forEach((l, i) => {
      const y = f.top + (i + 0.5) * row;
      const name = (l.best ? "→ " : "") + short(l.name, 20);
      add(f.svg, "text", { class: l.best ? "strong" : "", x: left - 8, y: y + 4, "text-anchor": "end" }, name);
      if (l.ks === null) return add(f.svg, "text", { class: "tick", x: left + 8, y: y + 4 }, "no refit");
      add(f.svg, "line", { class: "path", x1: f.x(l.low), x2: f.x(l.high), y1: y, y2: y });
      add(f.svg, "circle", { class: "dot", cx: f.x(l.ks), cy: y, r: 6 });
    });
  }

  const slider = document.getElementById("slider");
  const readout = document.getElementById("readout");
  const step = () => Number(slider.value);
  const predictions = (s) => ({ grid: data.grid, densities: s.densities, means: s.means });
  const shape = { peak: data.peak, xName: data.predicted };
  const charts = {
    "density-before": (host) => densities(host, predictions(data.steps[0]), shape),
    "density-step": (host) => densities(host, predictions(data.steps[step()]), shape),
    ratios,
    "cdf-before": (host) => cumulative(host, data.cdf.before),
    "cdf-after": (host) => cumulative(host, data.cdf.after),
    tradeoff: (host) => tradeoff(host, step()),
    spectrum, layers,
    changes: (host) => densities(host, data.changes, { peak: 0, xName: "change of the prediction" }),
  };
  const draw = (id) => { const host = document.getElementById(id); if (host) charts[id](host); };

  function move() {
    const s = data.steps[step()];
    readout.textContent = s.sentence;
    slider.setAttribute("aria-valuetext", s.sentence);
    document.getElementById("density-step").setAttribute("aria-label", `Densities of the predictions. ${s.sentence}`);
    document.getElementById("make-python").textContent = s.python;
    const command = document.getElementById("make-command");
    command.textContent = s.command ?? "";
    command.parentElement.hidden = s.command === null;
    document.querySelectorAll("#of-groups td.now").forEach((cell, i) => { cell.textContent = s.cells[i]; });
    draw("density-step");
    draw("tradeoff");
  }

  slider.addEventListener("input", move);
  // what is folded away has no width until it is opened
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", () => {
    if (fold.open) fold.querySelectorAll(".chart").forEach((host) => draw(host.id));
  }));
  // paper shows the chosen model
  let at = slider.value;
  addEventListener("beforeprint", () => { at = slider.value; slider.value = data.chosen; move(); });
  addEventListener("afterprint", () => { slider.value = at; move(); });
  let drawn = 0;
  new ResizeObserver(() => {
    if (drawn === document.body.clientWidth) return;
    drawn = document.body.clientWidth;
    Object.keys(charts).forEach(draw);
  }).observe(document.body);
  move();
})();
