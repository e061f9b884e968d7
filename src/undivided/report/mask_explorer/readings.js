// What a computed mask says: why a pair is allowed or hidden, the tiles that a kernel skips, the Python program.
(function (api) {
  "use strict";

  const { count, callRuns, entry, leaves } = api.internal;

  /**
   * Whether each call of the expression allows one pair, and why: {allowed, summary, parts}.
   *
   * A reason is named once: in the summary if the expression is a single call, otherwise in the parts.
   */
  function explain(computed, row, key) {
    const place = computed.places[row];
    const parts = leaves(computed.tree).map((leaf) => {
      const allows = contains(callRuns(leaf.built, row, place, computed.context), key);
      return { text: leaf.text, allows, why: reason(leaf, row, key, place, allows), leaf };
    });
    const allowed = contains(computed.rows[row], key);
    const deciding = parts.filter((part) => part.allows === allowed && decides(computed.tree, part.leaf, parts));
    const verdict = `Query ${row}, key ${key}: ${allowed ? "allowed" : "hidden"}`;
    // with several calls the list of parts has the reasons; the summary names the calls that decide
    const summary = parts.length === 1 ? `${verdict}, because ${parts[0].why}.` : `${verdict} by ${listed(deciding.map((part) => part.text))}.`;
    return { allowed, summary, parts: parts.map(({ text, allows, why }) => ({ text, allows, why })) };
  }

  const contains = (runs, key) => runs.some((start, at) => at % 2 === 0 && start <= key && key < runs[at + 1]);
  const listed = (items) => (items.length > 2 ? `${items.slice(0, -1).join(", ")} and ${items.at(-1)}` : items.join(" and "));

  /** Whether a call has a part in the verdict: its side of every & and | has the verdict of the whole. */
  function decides(node, leaf, parts) {
    const verdict = (one) => {
      if (one.kind === "call") return parts.find((part) => part.leaf === one).allows;
      const [a, b] = [verdict(one.left), verdict(one.right)];
      return one.kind === "&" ? a && b : a || b;
    };
    if (node.kind === "call") return node === leaf;
    const side = leaves(node.left).includes(leaf) ? node.left : node.right;
    return verdict(side) === verdict(node) && decides(side, leaf, parts);
  }

  function reason(leaf, row, key, place, allows) {
    const [part] = leaf.built.parts;
    const own = place.kvStart + place.own;
    const relative = key === own ? "is the query's own key" : `is ${count(Math.abs(key - own), "position")} ${key < own ? "before" : "after"} the query's own key, ${own}`;
    switch (leaf.name) {
      case "causal":
      case "window":
        return `key ${key} ${relative}`;
      case "sinks":
      case "prefix": {
        const first = entry(part.n, place);
        const place_ = `key ${key} is number ${key - place.kvStart} of its sequence, the first ${first} are kept`;
        return leaf.name === "sinks" && !allows && key - place.kvStart < first ? `key ${key} ${relative}` : place_;
      }
      case "lengths":
        if (!(place.real || part.q === null)) return `row ${row} is padding`;
        return allows ? `key ${key} is real` : `key ${key} is padding: the keys are ${place.kvStart} to ${place.kvStart + place.kvSize - 1}`;
      case "documents": {
        if (!place.real) return `row ${row} is padding`;
        const span = place.kvSize ? `keys ${place.kvStart} to ${place.kvStart + place.kvSize - 1}` : "no keys";
        return `row ${row} is in document ${place.sequence}, which has ${span}`;
      }
      case "document_ids":
        return part.q[row] < 0 ? `row ${row} is padding` : `row ${row} has id ${part.q[row]}, key ${key} has id ${part.kv[key]}`;
      case "chunks": {
        const offset = part.offset === null ? place.d : entry(part.offset, place);
        const [a, b] = [place.i + offset, key - place.kvStart - place.d + offset];
        return `positions ${a} and ${b} are in chunks ${Math.floor(a / part.size)} and ${Math.floor(b / part.size)}`;
      }
      default:
        return `its entry for row ${row} and key ${key} is ${allows ? "True" : "False"}`;
    }
  }

  /** Tiles of tile x tile pairs: {empty, partial, full, columns, kinds}; 0 is empty, 1 partial, 2 full. */
  function tiles(computed, tile) {
    const columns = Math.ceil(computed.kvLen / tile);
    const lines = Math.ceil(computed.qLen / tile);
    const counts = new Float64Array(columns * lines);
    computed.rows.forEach((runs, row) => {
      const base = Math.floor(row / tile) * columns;
      for (let at = 0; at < runs.length; at += 2) {
        for (let column = Math.floor(runs[at] / tile); column * tile < runs[at + 1]; column++) {
          counts[base + column] += Math.min(runs[at + 1], (column + 1) * tile) - Math.max(runs[at], column * tile);
        }
      }
    });
    const kinds = Array.from(counts, (pairs, at) => {
      const high = Math.min(tile, computed.qLen - Math.floor(at / columns) * tile);
      const wide = Math.min(tile, computed.kvLen - (at % columns) * tile);
      return pairs === 0 ? 0 : pairs === high * wide ? 2 : 1;
    });
    const number = (kind) => kinds.filter((one) => one === kind).length;
    return { empty: number(0), partial: number(1), full: number(2), columns, kinds };
  }

  /** The expression as a Python program. */
  function python(computed) {
    let code = computed.text.trim().replace(/\s*\n\s*/g, " ");
    const calls = leaves(computed.tree).sort((a, b) => b.start - a.start);
    const shift = computed.text.length - computed.text.trimStart().length;
    if (!/\n|#/.test(computed.text)) {
      for (const leaf of calls) {
        const at = leaf.start - shift;
        const rest = code.slice(at + leaf.name.length);
        const call = /^\s*\(/.test(rest) ? rest : `()${rest}`;
        code = `${code.slice(0, at)}masks.${leaf.name}${leaf.name === "dense" ? asTensor(call) : call}`;
      }
    }
    const tensors = calls.some((leaf) => leaf.name === "dense");
    const sizes = `${computed.qLen}, ${computed.kvLen}${computed.batch > 1 ? `, batch=${computed.batch}` : ""}`;
    return `${tensors ? "import torch\n\n" : ""}from undivided import masks\n\nmask = ${code}\nprint(mask.draw(${sizes}))\n`;
  }

  function asTensor(rest) {
    let depth = 0;
    const close = [...rest].findIndex((one) => (depth += "([".includes(one) ? 1 : ")]".includes(one) ? -1 : 0) === 0 && one === ")");
    const inner = rest.slice(rest.indexOf("(") + 1, close).replace(/^\s*tensor\s*=\s*/, "");
    return `(torch.tensor(${inner.replace(/,\s*$/, "")}, dtype=torch.bool))${rest.slice(close + 1)}`;
  }

  Object.assign(api.internal, { explain, python, tiles });
  Object.assign(api, { explain, tiles, python });
})(globalThis.undividedMasks);
