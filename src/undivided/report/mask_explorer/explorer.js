// The explorer: every element with the attribute `data-mask-explorer` shows a mask, first that of its value.
(function (api) {
  "use strict";

  const { CALLS, MaskError, PARAMETERS, count, compute, explain, python, tiles } = api.internal;

  const STYLE = `
.mask-explorer { --ink: #1c2330; --paper: #ffffff; --soft: #eef1f5; --line: #6b7585; --allowed: #1f5fa8; --skipped: #dde3ea;
  --partial: #ffffff; --bad: #a11212; --accent: #1f5fa8; --on-accent: #ffffff; color: var(--ink); font: inherit; line-height: 1.5; }
@media (prefers-color-scheme: dark) { .mask-explorer { --ink: #e6eaf0; --paper: #12161d; --soft: #1d232d; --line: #8d99ab;
  --allowed: #6aa9f2; --skipped: #2a323e; --partial: #12161d; --bad: #ff9c9c; --accent: #8ebdf7; --on-accent: #0b1017; } }
[data-theme="light"] .mask-explorer, [data-md-color-scheme="default"] .mask-explorer { --ink: #1c2330; --paper: #ffffff;
  --soft: #eef1f5; --line: #6b7585; --allowed: #1f5fa8; --skipped: #dde3ea; --partial: #ffffff; --bad: #a11212;
  --accent: #1f5fa8; --on-accent: #ffffff; }
[data-theme="dark"] .mask-explorer, [data-md-color-scheme="slate"] .mask-explorer { --ink: #e6eaf0; --paper: #12161d;
  --soft: #1d232d; --line: #8d99ab; --allowed: #6aa9f2; --skipped: #2a323e; --partial: #12161d; --bad: #ff9c9c;
  --accent: #8ebdf7; --on-accent: #0b1017; }
.mask-explorer * { box-sizing: border-box; }
.mask-explorer label { display: block; font-size: 0.875rem; }
.mask-explorer input, .mask-explorer select, .mask-explorer button { font: inherit; font-size: 1rem; color: var(--ink);
  background: var(--paper); border: 1px solid var(--line); border-radius: 4px; padding: 0.3rem 0.5rem; max-width: 100%; }
.mask-explorer button { cursor: pointer; background: var(--accent); color: var(--on-accent); border-color: var(--accent); }
.mask-explorer :focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.mask-explorer .wide { width: 100%; font-family: ui-monospace, monospace; }
.mask-explorer .line { display: flex; flex-wrap: wrap; gap: 0.5rem 1rem; align-items: end; margin: 0.75rem 0; }
.mask-explorer .line input[type="number"] { width: 6.5rem; }
.mask-explorer fieldset { border: 1px solid var(--line); border-radius: 4px; margin: 0.75rem 0; padding: 0 0.75rem; min-width: 0; }
.mask-explorer .error { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; margin: 0.5rem 0; }
.mask-explorer .views { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1rem; }
.mask-explorer .views > * { min-width: 0; }
.mask-explorer canvas { display: block; max-width: 100%; }
.mask-explorer .grid { box-shadow: 0 0 0 1px var(--line); width: fit-content; max-width: 100%; touch-action: manipulation; cursor: crosshair; }
.mask-explorer .scroll { max-height: 16rem; overflow: auto; border: 1px solid var(--line); }
.mask-explorer table { border-collapse: collapse; width: 100%; display: table; font-size: 0.875rem; margin: 0; }
.mask-explorer th, .mask-explorer td { text-align: left; padding: 0.15rem 0.6rem; color: var(--ink); }
.mask-explorer pre { background: var(--soft); color: var(--ink); padding: 0.6rem; overflow-x: auto; margin: 0.5rem 0; }
.mask-explorer ul { padding-left: 1.2rem; margin: 0.3rem 0; overflow-wrap: anywhere; }
.mask-explorer .legend { font-size: 0.875rem; margin: 0.3rem 0; }
.mask-explorer .key { display: inline-block; width: 0.9em; height: 0.9em; border: 1px solid var(--line); vertical-align: -0.1em; margin: 0 0.3em 0 0.6em; }
@media (max-width: 640px) { .mask-explorer .views { grid-template-columns: minmax(0, 1fr); } }
`;

  const EXAMPLES = [
    ["causal, with documents", "causal() & documents([0, 3, 7, 12])"],
    ["a streaming window", "window(3, 0) | sinks(2)"],
    ["a prefix-LM", "causal() | prefix(4)"],
    ["chunked prefill", "causal(align='bottom_right') & lengths([12], [5])"],
    ["a padded batch", "causal() & lengths([9, 5], [9, 5])"],
    ["chunks within a causal mask", "chunks(4) & causal()"],
    ["interleaved documents", "document_ids([0, 0, 1, 1, 0, 1, 2, 2, -1])"],
    ["a boolean matrix", "dense([[1, 0, 1], [0, 1, 0], [0, 0, 0]])"],
    ["a function of the indices", "predicate(lambda b, h, q, k: (q + k) % 3 == 0) & causal()"],
  ];

  const FIELDS = {
    causal: { align: "" }, window: { left: "3", right: "0", align: "" }, lengths: { kv: "[6]", q: "[6]" },
    documents: { cu_seqlens_q: "[0, 3, 8]", cu_seqlens_kv: "" }, document_ids: { ids_q: "[0, 0, 1, 1]", ids_kv: "" },
    prefix: { n: "2" }, sinks: { n: "2", align: "" }, chunks: { size: "4", align: "", offset: "" },
    dense: { tensor: "[[1, 0], [1, 1]]" }, predicate: { fn: "lambda b, h, q, k: (q + k) % 2 == 0" },
  };

  const MOST = 2048; // queries or keys that are drawn
  const LISTED = 512; // rows in the table
  let explorers = 0;

  function element(name, properties = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key in node && !key.startsWith("aria")) node[key] = value;
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  const option = (text, value = text) => element("option", { textContent: text, value });

  /** Fill an element with an explorer. */
  function mount(root) {
    if (!document.getElementById("mask-explorer-style")) {
      document.head.append(element("style", { id: "mask-explorer-style", textContent: STYLE }));
    }
    const prefix = `mask-explorer-${++explorers}-`;
    let ids = 0;
    const labelled = (text, control) => {
      control.id = `${prefix}${ids++}`;
      return element("div", {}, element("label", { htmlFor: control.id, textContent: text }), control);
    };
    const number = (placeholder) => element("input", { type: "number", min: 1, max: MOST, step: 1, placeholder });
    const input = element("input", {
      type: "text", className: "wide", spellcheck: false, autocomplete: "off", autocapitalize: "off",
      value: root.getAttribute("data-mask-explorer") || EXAMPLES[0][1],
    });
    const error = element("div", { className: "error", role: "alert", id: `${prefix}error` });
    const [queries, keys] = [number("auto"), number("auto")];
    const batch = element("select");
    const tile = element("select", {}, ...[2, 4, 8, 16, 32, 64, 128].map((size) => option(`${size} x ${size}`, size)));
    tile.value = "4";
    const presets = element("select", {}, option("choose ...", ""), ...EXAMPLES.map(([name, text]) => option(name, text)));
    const constructor = element("select", {}, ...CALLS.map((name) => option(name)));
    const operator = element("select", {}, option("& (both)", "&"), option("| (either)", "|"), option("replace", "="));
    const fields = element("div", { className: "line" });
    const add = element("button", { type: "button", textContent: "Add" });
    const summary = element("p", { role: "status" });
    const canvas = element("canvas", { "aria-hidden": "true" });
    const hint = element("p", { className: "legend", id: `${prefix}hint` });
    hint.append("Rows are queries, columns are keys. Arrow keys, Home and End move to a pair.");
    const grid = element("div", {
      className: "grid", tabIndex: 0, role: "application", "aria-roledescription": "mask",
      "aria-label": "Pairs of the mask", "aria-describedby": hint.id,
    }, canvas);
    const legend = element("p", { className: "legend" });
    for (const [colour, text] of [["--allowed", "allowed"], ["--partial", "hidden"], ["--skipped", "hidden, in a skipped tile"]]) {
      legend.append(element("span", { className: "key", style: `background: var(${colour})` }), text);
    }
    const why = element("div", { role: "status", "aria-label": "Reason of the chosen pair" });
    const rows = element("tbody");
    const head = element("tr", {}, element("th", { scope: "col", textContent: "row" }), element("th", { scope: "col", textContent: "keys [start, stop)" }));
    const table = element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Row ranges" },
      element("table", {}, element("thead", {}, head), rows));
    const code = element("pre", { tabIndex: 0, role: "region", "aria-label": "Python" });
    const copy = element("button", { type: "button", textContent: "Copy the Python" });
    const copied = element("span", { role: "status" });
    const title = (text) => element("p", {}, element("strong", { textContent: text }));

    const left = element("div", {}, summary, grid, legend, hint);
    const right = element("div", {}, title("The chosen pair"), why, title("Row ranges"), table, title("Python"), code,
      element("div", { className: "line" }, copy, copied));
    const views = element("div", { className: "views" }, left, right);
    const composer = element("fieldset", {}, element("legend", { textContent: "Compose" }),
      element("div", { className: "line" }, labelled("Join by", operator), labelled("Mask", constructor)), fields,
      element("div", { className: "line" }, add));
    root.classList.add("mask-explorer");
    root.replaceChildren(labelled("Expression", input), error,
      element("div", { className: "line" }, labelled("Example", presets), labelled("Queries", queries),
        labelled("Keys", keys), labelled("Batch element", batch), labelled("Tile", tile)),
      composer, views);
    input.setAttribute("aria-describedby", error.id);

    let computed = null;
    let kinds = null;
    let chosen = [0, 0];

    function update() {
      const size = (control) => (control.value === "" ? undefined : Number(control.value));
      try {
        for (const control of [queries, keys]) {
          if (size(control) > MOST) throw new MaskError(`the explorer draws at most ${MOST} queries and keys`, 0);
        }
        computed = compute(input.value, size(queries), size(keys), Number(batch.value || 0));
        if (Math.max(computed.qLen, computed.kvLen) > MOST) throw new MaskError(`the explorer draws at most ${MOST} queries and keys`, 0);
      } catch (wrong) {
        if (!(wrong instanceof MaskError)) throw wrong;
        if (Number(batch.value) > 0) {
          batch.value = "0";
          update();
          return;
        }
        input.setAttribute("aria-invalid", "true");
        error.textContent = `${input.value}\n${" ".repeat(wrong.position)}^\nAt character ${wrong.position + 1}: ${wrong.message}.`;
        views.hidden = true;
        computed = null;
        return;
      }
      input.removeAttribute("aria-invalid");
      error.textContent = "";
      views.hidden = false;
      const element_ = batch.value || "0";
      batch.replaceChildren(...[...Array(computed.batch).keys()].map((n) => option(String(n))));
      batch.value = element_ < computed.batch ? element_ : "0";
      batch.disabled = computed.batch === 1;
      queries.placeholder = String(computed.qLen);
      keys.placeholder = String(computed.kvLen);
      chosen = [Math.min(chosen[0], computed.qLen - 1), Math.min(chosen[1], computed.kvLen - 1)];
      kinds = tiles(computed, Number(tile.value));
      const pairs = computed.rows.reduce((sum, runs) => sum + runs.reduce((total, edge, at) => total + (at % 2 ? edge : -edge), 0), 0);
      const all = computed.qLen * computed.kvLen;
      summary.textContent = `${count(computed.qLen, "query", "queries")}, ${count(computed.kvLen, "key")}: ` +
        `${pairs.toLocaleString("en")} of ${all.toLocaleString("en")} pairs allowed (${((100 * pairs) / all).toFixed(1)} %); ` +
        `${kinds.empty} of ${count(kinds.kinds.length, "tile")} skipped, ${kinds.partial} partial, ${kinds.full} full.`;
      rows.replaceChildren(...computed.rows.slice(0, LISTED).map((runs, row) => {
        const text = runs.length ? runs.map((edge, at) => (at % 2 ? `${edge})` : `[${edge}, `)).join("").replace(/\)\[/g, ") [") : "none";
        return element("tr", {}, element("th", { scope: "row", textContent: row }), element("td", { textContent: text }));
      }));
      if (computed.qLen > LISTED) rows.append(element("tr", {}, element("td", { colSpan: 2, textContent: `and ${computed.qLen - LISTED} more rows` })));
      code.textContent = python(computed);
      draw();
      tell();
    }

    function draw() {
      if (!computed || !left.clientWidth) return;
      const style = getComputedStyle(root);
      const colour = (name) => style.getPropertyValue(name).trim();
      const scale = window.devicePixelRatio || 1;
      const cell = Math.min(left.clientWidth / computed.kvLen, 36);
      const wide = cell * computed.kvLen;
      canvas.style.width = `${wide}px`;
      const high = Math.max(1, Math.min(cell * computed.qLen, 900));
      const [stepX, stepY] = [cell, high / computed.qLen];
      canvas.style.height = `${high}px`;
      canvas.width = wide * scale;
      canvas.height = high * scale;
      const paint = canvas.getContext("2d");
      paint.scale(scale, scale);
      paint.fillStyle = colour("--partial");
      paint.fillRect(0, 0, wide, high);
      const size = Number(tile.value);
      paint.fillStyle = colour("--skipped");
      kinds.kinds.forEach((kind, at) => {
        const [x, y] = [(at % kinds.columns) * size, Math.floor(at / kinds.columns) * size];
        if (kind === 0) paint.fillRect(x * stepX, y * stepY, (Math.min(x + size, computed.kvLen) - x) * stepX, (Math.min(y + size, computed.qLen) - y) * stepY);
      });
      const gap = Math.min(stepX, stepY) > 6 ? 1 : 0;
      paint.fillStyle = colour("--allowed");
      computed.rows.forEach((runs, row) => {
        for (let at = 0; at < runs.length; at += 2) {
          if (!gap) paint.fillRect(runs[at] * stepX, row * stepY, (runs[at + 1] - runs[at]) * stepX, stepY);
          else for (let key = runs[at]; key < runs[at + 1]; key++) paint.fillRect(key * stepX + gap, row * stepY + gap, stepX - 2 * gap, stepY - 2 * gap);
        }
      });
      paint.strokeStyle = colour("--line");
      paint.lineWidth = 0.5;
      if (size * Math.min(stepX, stepY) > 6) {
        paint.beginPath();
        for (let x = 0; x <= computed.kvLen; x += size) paint.rect(x * stepX, 0, 0, high);
        for (let y = 0; y <= computed.qLen; y += size) paint.rect(0, y * stepY, computed.kvLen * stepX, 0);
        paint.stroke();
      }
      paint.strokeStyle = colour("--ink");
      paint.lineWidth = 2;
      paint.strokeRect(chosen[1] * stepX, chosen[0] * stepY, Math.max(stepX, 3), Math.max(stepY, 3));
      grid.step = [stepX, stepY];
    }

    function tell() {
      const explanation = explain(computed, ...chosen);
      const items = explanation.parts.map((part) => element("li", { textContent: `${part.text} ${part.allows ? "allows" : "hides"} it: ${part.why}` }));
      why.replaceChildren(element("p", { textContent: explanation.summary }), ...(items.length > 1 ? [element("ul", {}, ...items)] : []));
    }

    function choose(row, key) {
      if (!computed) return;
      const next = [Math.max(0, Math.min(row, computed.qLen - 1)), Math.max(0, Math.min(key, computed.kvLen - 1))];
      if (next[0] === chosen[0] && next[1] === chosen[1]) return;
      chosen = next;
      draw();
      tell();
    }

    function point(event) {
      if (!grid.step) return;
      const box = canvas.getBoundingClientRect();
      choose(Math.floor((event.clientY - box.top) / grid.step[1]), Math.floor((event.clientX - box.left) / grid.step[0]));
    }

    function move(event) {
      const [row, key] = chosen;
      const places = {
        ArrowUp: [row - 1, key], ArrowDown: [row + 1, key], ArrowLeft: [row, key - 1], ArrowRight: [row, key + 1],
        PageUp: [row - 8, key], PageDown: [row + 8, key], Home: [row, 0], End: [row, MOST],
      };
      const place = places[event.key];
      if (!place || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      choose(...place);
    }

    function showFields() {
      fields.replaceChildren(...Object.entries(FIELDS[constructor.value]).map(([name, value]) => {
        const control = name === "align" ? element("select", {}, option("None", ""), option("top_left", "'top_left'"), option("bottom_right", "'bottom_right'"))
          : element("input", { type: "text", value, spellcheck: false, placeholder: "None" });
        control.dataset.name = name;
        return labelled(name, control);
      }));
    }

    function addPart() {
      const controls = [...fields.querySelectorAll("[data-name]")].filter((control) => control.value.trim());
      const known = PARAMETERS[constructor.value];
      const values = controls.map((control, at) => (known[at] === control.dataset.name ? "" : `${control.dataset.name}=`) + control.value.trim());
      const call = `${constructor.value}(${values.join(", ")})`;
      const old = input.value.trim();
      const bracketed = (text, kind) => (kind !== "&" || !text.includes("|") ? text : `(${text})`);
      input.value = !old || operator.value === "=" ? call : `${bracketed(old, operator.value)} ${operator.value} ${call}`;
      update();
    }

    async function copyCode() {
      try {
        await navigator.clipboard.writeText(code.textContent);
        copied.textContent = "Copied.";
      } catch {
        const selection = window.getSelection();
        selection.selectAllChildren(code);
        copied.textContent = "The text is selected: press Ctrl+C.";
      }
    }

    for (const control of [input, queries, keys, batch, tile]) control.addEventListener("input", update);
    presets.addEventListener("change", () => {
      if (!presets.value) return;
      input.value = presets.value;
      queries.value = keys.value = batch.value = "";
      update();
    });
    constructor.addEventListener("change", showFields);
    add.addEventListener("click", addPart);
    grid.addEventListener("pointermove", point);
    grid.addEventListener("pointerdown", point);
    grid.addEventListener("keydown", move);
    copy.addEventListener("click", copyCode);
    new ResizeObserver(draw).observe(left);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    const themes = new MutationObserver(draw);
    for (const place of [document.documentElement, document.body]) {
      themes.observe(place, { attributes: true, attributeFilter: ["data-theme", "data-md-color-scheme"] });
    }
    showFields();
    update();
  }

  /** Make an explorer of every element with the attribute `data-mask-explorer` that is not one yet. */
  function mountAll() {
    document.querySelectorAll("[data-mask-explorer]:not(.mask-explorer)").forEach(mount);
  }

  if (typeof document !== "undefined") {
    api.mount = mount;
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", mountAll);
    else mountAll();
    // Material for MkDocs replaces the page without loading it again.
    if (typeof window.document$?.subscribe === "function") window.document$.subscribe(mountAll);
  }
})(globalThis.undividedMasks);
