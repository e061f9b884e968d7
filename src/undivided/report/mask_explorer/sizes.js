// The sizes of a mask, and the place of each row in its sequence.
//
// i and j are the indices of a query row and a key; i' and j' count within a sequence (a batch element or a document).
// The row's own key is i' + d; d depends on the alignment.
(function (api) {
  "use strict";

  const { EXAMPLE, MaskError, count } = api.internal;

  const ends = (length, start) => Math.max(0, ...length.map((one, at) => one + (start?.[at] ?? 0)));

  /** Sizes that show the structure of a mask, as `undivided mask` chooses them: {batch, q, kv, hasOwn}. */
  function naturalSizes({ parts }) {
    let [batch, q, kv, hasOwn] = [1, 0, 0, false];
    const packed = parts.some((part) => part.kind === "documents");
    for (const part of parts) {
      if (part.kind === "lengths") {
        batch = part.kv.length;
        kv = ends(part.kv, part.kvStart);
        q = part.q === null ? kv : ends(part.q, part.qStart);
      } else if (part.kind === "documents") {
        q = part.totalQ ?? (part.qSlots ?? part.q).at(-1);
        kv = part.totalKv ?? (part.kvSlots ?? part.kv).at(-1);
      } else if (part.kind === "document_ids") {
        [q, kv] = [part.q.length, part.kv.length];
      } else if (part.kind === "dense") {
        [q, kv] = [part.rows.length, part.rows[0].length];
      } else {
        const perSequence = part.kind === "chunks" ? part.offset : part.n;
        if (Array.isArray(perSequence) && !packed) batch = Math.max(batch, perSequence.length);
      }
      hasOwn ||= ["lengths", "documents", "document_ids", "dense"].includes(part.kind);
    }
    return { batch, q: q || EXAMPLE, kv: kv || EXAMPLE, hasOwn };
  }

  function checkSizes({ parts }, batch, qLen, kvLen) {
    const wrong = (message) => {
      throw new MaskError(message, 0);
    };
    const packed = parts.find((part) => part.kind === "documents");
    const sequences = packed ? packed.q.length - 1 : batch;
    const entries = (name, values) => {
      if (Array.isArray(values) && values.length !== sequences) {
        wrong(`${name} must have one entry for each of the ${count(sequences, "sequence")}, got ${values.length}`);
      }
    };
    const bounded = (name, end, limit) => {
      if (end > limit) wrong(`lengths(${name}) must be at most ${limit}, the ${name} length of the call, got ${end}`);
    };
    const exactly = (name, offsets, total, tokens) => {
      if (total !== null && total !== tokens) wrong(`total_${name} must be ${tokens}, the ${name} tokens, got ${total}`);
      if (offsets.at(-1) > tokens || (offsets.at(-1) < tokens && total === null)) {
        wrong(`the last offset of documents must be ${tokens}, the ${name} tokens, got ${offsets.at(-1)}`);
      }
    };
    for (const part of parts) {
      if (part.kind === "lengths") {
        if (part.kv.length !== batch) wrong(`lengths must have ${batch} entries, one per batch element, got ${part.kv.length}`);
        bounded("kv", ends(part.kv, part.kvStart), kvLen);
        if (part.q !== null) bounded("q", ends(part.q, part.qStart), qLen);
      } else if (part.kind === "documents") {
        if (batch !== 1) wrong("packed documents must be used on a batch of one");
        exactly("q", part.qSlots ?? part.q, part.totalQ, qLen);
        exactly("kv", part.kvSlots ?? part.kv, part.totalKv, kvLen);
      } else if (part.kind === "document_ids") {
        if (part.q.length !== qLen) wrong(`ids_q must have ${qLen} entries, one per query, got ${part.q.length}`);
        if (part.kv.length !== kvLen) wrong(`ids_kv must have ${kvLen} entries, one per key, got ${part.kv.length}`);
      } else if (part.kind === "dense") {
        const [have, wide] = [part.rows.length, part.rows[0].length];
        if (![1, qLen].includes(have) || ![1, kvLen].includes(wide)) {
          wrong(`dense(tensor) must have ${qLen} rows of ${kvLen}, got ${have} of ${wide}`);
        }
      } else {
        entries(part.kind === "chunks" ? "chunks(offset)" : "prefix(n)", part.kind === "chunks" ? part.offset : part.n);
      }
    }
  }

  const equal = (a, b) => a.every((one, at) => one === b[at]);

  /** Whether keys align at the bottom right; an error if the alignments differ and the mask does not choose. */
  function isBottomRight({ align, left, right, parts }, qLen, kvLen) {
    if (left === null && right === null && !parts.some((part) => ["chunks", "global"].includes(part.kind))) return false;
    const lengths = parts.find((part) => ["lengths", "documents"].includes(part.kind));
    const agree = !lengths ? qLen === kvLen
      : lengths.q === null ? lengths.kv.every((one) => one === qLen)
      : equal(lengths.q, lengths.kv);
    if (!agree && align === null) {
      throw new MaskError(
        "align must be given, because queries and keys have different lengths: write align='top_left' or " +
          "align='bottom_right' in causal, window, sinks or chunks", 0);
    }
    return !agree && align === "bottom_right";
  }

  /** Per row: {real, sequence, i, kvStart, kvSize, d, own}; i is i', own is i' + d. */
  function rowPlaces(built, qLen, kvLen, element) {
    const bottomRight = isBottomRight(built, qLen, kvLen);
    const part = built.parts.find((one) => ["lengths", "documents"].includes(one.kind));
    const place = (row, sequence, qStart, qSize, kvStart, kvSize) => {
      const d = bottomRight ? kvSize - qSize : 0;
      const i = row - qStart;
      return { real: i >= 0 && i < qSize, sequence, i, kvStart, kvSize, d, own: i + d };
    };
    const rows = [...Array(qLen).keys()];
    if (!part) return rows.map((row) => place(row, element, 0, qLen, 0, kvLen));
    if (part.kind === "lengths") {
      const [kv, q, kvStart, qStart] = [part.kv, part.q, part.kvStart, part.qStart].map((one) => one?.[element] ?? null);
      return rows.map((row) => place(row, element, qStart ?? 0, q ?? qLen, kvStart ?? 0, kv));
    }
    const [q, kv] = [part.qSlots ?? part.q, part.kvSlots ?? part.kv];
    const last = part.q.length - 2;
    let n = 0;
    return rows.map((row) => {
      while (n < last && q[n + 1] <= row) n++;
      if (last < 0) return place(row, 0, 0, 0, 0, 0);
      return place(row, n, q[n], part.q[n + 1] - part.q[n], kv[n], part.kv[n + 1] - part.kv[n]);
    });
  }

  Object.assign(api.internal, { checkSizes, naturalSizes, rowPlaces });
})(globalThis.undividedMasks);
