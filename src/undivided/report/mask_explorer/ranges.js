// The keys of every row as ranges [start, stop, start, stop, ...].
(function (api) {
  "use strict";

  const { MaskError, parseTree, build, checkSizes, naturalSizes, rowPlaces } = api.internal;

  /** The keys of two lists of ranges [start, stop, start, stop, ...] in common. */
  function common(a, b) {
    const runs = [];
    for (let x = 0, y = 0; x < a.length && y < b.length; a[x + 1] < b[y + 1] ? (x += 2) : (y += 2)) {
      const start = Math.max(a[x], b[y]);
      const stop = Math.min(a[x + 1], b[y + 1]);
      if (start < stop) runs.push(start, stop);
    }
    return runs;
  }

  /** The keys of either list; ranges that overlap or touch become one. */
  function either(a, b) {
    const pairs = [];
    for (const runs of [a, b]) for (let at = 0; at < runs.length; at += 2) pairs.push([runs[at], runs[at + 1]]);
    pairs.sort((x, y) => x[0] - y[0]);
    const joined = [];
    for (const [start, stop] of pairs) {
      if (joined.length && start <= joined.at(-1)) joined[joined.length - 1] = Math.max(joined.at(-1), stop);
      else joined.push(start, stop);
    }
    return joined;
  }

  function runsWhere(length, allowed) {
    const runs = [];
    for (let key = 0; key < length; key++) {
      if (!allowed(key)) continue;
      if (runs.at(-1) === key) runs[runs.length - 1] = key + 1;
      else runs.push(key, key + 1);
    }
    return runs;
  }

  const entry = (value, place) => (Array.isArray(value) ? value[place.sequence] ?? 0 : value);

  /** The keys that one call allows in a row, as ranges; `place` is the row's place in its sequence. */
  function callRuns(built, row, place, context) {
    const [part] = built.parts;
    let runs = [-Infinity, Infinity];
    const { left, right } = built;
    const within = (start, stop) => {
      runs = common(runs, [place.kvStart + start, place.kvStart + stop]);
    };
    if (left !== null || right !== null) within(left === null ? -Infinity : place.own - left, right === null ? Infinity : place.own + right + 1);
    switch (part?.kind) {
      case "lengths":
      case "documents":
        if (place.real || (part.kind === "lengths" && part.q === null)) within(0, place.kvSize);
        else runs = [];
        break;
      case "prefix":
        within(-Infinity, entry(part.n, place));
        break;
      case "chunks": {
        const offset = part.offset === null ? place.d : entry(part.offset, place);
        const start = Math.floor((place.i + offset) / part.size) * part.size + place.d - offset;
        within(start, start + part.size);
        break;
      }
      case "document_ids": {
        const id = part.q[row];
        part.runs ??= idRuns(part.kv);
        runs = common(runs, id < 0 ? [] : part.runs.get(id) ?? []);
        break;
      }
      case "dense": {
        const line = part.rows[part.rows.length === 1 ? 0 : row];
        runs = runsWhere(context.kvLen, (key) => line[line.length === 1 ? 0 : key]);
        break;
      }
      case "predicate":
        runs = runsWhere(context.kvLen, (key) => part.run([context.element, 0, row, key]));
    }
    return common(runs, [0, context.kvLen]);
  }

  function idRuns(ids) {
    const runsById = new Map();
    ids.forEach((id, key) => {
      const runs = runsById.get(id) ?? [];
      if (runs.at(-1) === key) runs[runs.length - 1] = key + 1;
      else runs.push(key, key + 1);
      runsById.set(id, runs);
    });
    return runsById;
  }

  function treeRuns(node, row, place, context) {
    if (node.kind === "call") return callRuns(node.built, row, place, context);
    const [a, b] = [node.left, node.right].map((side) => treeRuns(side, row, place, context));
    return node.kind === "&" ? common(a, b) : either(a, b);
  }

  const leaves = (node) => (node.kind === "call" ? [node] : [...leaves(node.left), ...leaves(node.right)]);

  /**
   * A mask with its sizes.
   *
   * expression: text, as for `undivided mask`. qLen, kvLen: sizes; if absent, those that the expression implies.
   * element: the batch element. Returns {text, tree, qLen, kvLen, batch, element, rows, places}; rows are the ranges.
   */
  function compute(expression, qLen, kvLen, element = 0) {
    const text = String(expression);
    const tree = parseTree(text);
    for (const leaf of leaves(tree)) leaf.built = build(leaf, text);
    const built = build(tree, text);
    const natural = naturalSizes(built);
    const queries = qLen || (natural.hasOwn || !kvLen ? natural.q : kvLen);
    const keys = kvLen || (natural.hasOwn || !qLen ? natural.kv : qLen);
    for (const [name, size] of [["q_len", queries], ["kv_len", keys]]) {
      if (!Number.isInteger(size) || size < 1) throw new MaskError(`${name} must be a whole number of at least 1, got ${size}`, 0);
    }
    if (!Number.isInteger(element) || element < 0 || element >= natural.batch) {
      throw new MaskError(`the batch element must be at least 0 and below ${natural.batch}, got ${element}`, 0);
    }
    checkSizes(built, natural.batch, queries, keys);
    const places = rowPlaces(built, queries, keys, element);
    const context = { kvLen: keys, element };
    const rows = places.map((place, row) => treeRuns(tree, row, place, context));
    return { text, tree, qLen: queries, kvLen: keys, batch: natural.batch, element, rows, places, context };
  }

  /** The ranges of keys of every row, [[start, stop, start, stop, ...], ...]; a row without keys is []. */
  const ranges = (expression, qLen, kvLen, element = 0) => compute(expression, qLen, kvLen, element).rows;

  Object.assign(api.internal, { callRuns, entry, leaves, compute });
  Object.assign(api, { ranges, compute });
})(globalThis.undividedMasks);
