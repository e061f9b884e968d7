// Masks and their rules: the arguments of the constructors, and how masks join.
//
// A mask is {align, left, right, parts}, as in undivided.masks.
(function (api) {
  "use strict";

  const { INT32_MAX, MaskError, count } = api.internal;

  /** A mask: alignment, band (left, right) and parts, as in undivided.masks, from a tree. */
  function build(node, text) {
    if (node.kind === "call") return CONSTRUCTORS[node.name](new Arguments(node));
    const [a, b] = [build(node.left, text), build(node.right, text)];
    return node.kind === "&" ? intersect(a, b, node) : unite(a, b, node);
  }

  const mask = (align, left, right, parts = []) => ({ align, left, right, parts });

  function intersect(a, b, node) {
    const parts = [...a.parts, ...b.parts];
    if (parts.filter((part) => ["lengths", "documents"].includes(part.kind)).length > 1) {
      throw new MaskError("a mask must have one of lengths(...) and documents(...), and only once", node.at);
    }
    return mask(commonAlign(a, b, node), smaller(a.left, b.left), smaller(a.right, b.right), parts);
  }

  function unite(a, b, node) {
    const [band, first] = b.parts.length === 0 ? [b, a] : [a, b];
    const bare = first.parts.length === 1 && first.parts[0].kind === "prefix" && first.left === null &&
      (first.right === null || first.right === 0);
    if (!bare || band.parts.length) {
      throw new MaskError(
        "| must join causal or window to a bare prefix or sinks. & binds tighter than |: write " +
          "(causal() | prefix(n)) & lengths(kv)", node.at);
    }
    const align = commonAlign(a, b, node);
    if (band.left === null && first.right === 0) return mask(align, null, band.right);
    if (band.left === null && band.right === null) return mask(align, null, null);
    const right = first.right === 0 ? band.right : null;
    return mask(align, null, right, [{ kind: "global", left: band.left, right: band.right, n: first.parts[0].n }]);
  }

  function commonAlign(a, b, node) {
    if (a.align !== null && b.align !== null && a.align !== b.align) {
      throw new MaskError("a mask must have one alignment: pass the same align to both sides, or to one only", node.at);
    }
    return a.align === null ? b.align : a.align;
  }

  const smaller = (a, b) => (a === null ? b : b === null ? a : Math.min(a, b));

  /** The checked arguments of one call. */
  class Arguments {
    constructor(node) {
      this.node = node;
    }
    has(name) {
      return (this.node.arguments[name]?.value ?? null) !== null;
    }
    raw(name) {
      return this.node.arguments[name]?.value ?? null;
    }
    wrong(name, must) {
      const value = this.raw(name);
      const text = value === null ? "None" : value?.predicate ? "a function" : JSON.stringify(value);
      throw new MaskError(`${name} must ${must}, got ${text}`, this.node.arguments[name]?.at ?? this.node.start);
    }
    align() {
      const value = this.raw("align");
      if (![null, "top_left", "bottom_right"].includes(value)) this.wrong("align", "be 'top_left', 'bottom_right' or None");
      return value;
    }
    integer(name, least) {
      const value = this.raw(name);
      if (!Number.isInteger(value)) this.wrong(name, "be an int");
      if (least !== undefined && value < least) this.wrong(name, `be at least ${least}`);
      return value;
    }
    optional(name) {
      return this.has(name) ? this.integer(name, 0) : null;
    }
    side(name) {
      if (!this.has(name)) return null;
      const value = this.integer(name);
      if (value < -1) this.wrong(name, "be at least 0, or None (or -1) for an unbounded side");
      return value === -1 ? null : Math.min(value, INT32_MAX);
    }
    vector(name, least) {
      const value = this.raw(name);
      if (!Array.isArray(value) || !value.every(Number.isInteger)) this.wrong(name, "be a list of ints");
      if (value.some((one) => Math.abs(one) > INT32_MAX)) this.wrong(name, `hold values of at most ${INT32_MAX}`);
      if (least !== undefined && value.some((one) => one < least)) this.wrong(name, `hold values of at least ${least}`);
      return value;
    }
    optionalVector(name, least) {
      return this.has(name) ? this.vector(name, least) : null;
    }
    size(name, least) {
      if (Array.isArray(this.raw(name))) return this.vector(name, least);
      const value = this.integer(name, least);
      if (Math.abs(value) > INT32_MAX) this.wrong(name, `be at most ${INT32_MAX}`);
      return value;
    }
    sameLength(name, values, length) {
      if (values !== null && values.length !== length) this.wrong(name, `have ${count(length, "entry", "entries")}`);
    }
    offsets(name) {
      const value = this.vector(name);
      if (!value.length) this.wrong(name, "hold N + 1 offsets for N documents");
      if (value[0] !== 0) this.wrong(name, "start at 0");
      if (value.some((one, at) => at && one < value[at - 1])) this.wrong(name, "never decrease");
      return value;
    }
    slots(name, real) {
      if (!this.has(name)) return null;
      const value = this.vector(name, 0);
      this.sameLength(name, value, real.length);
      for (let n = 0; n + 1 < real.length; n++) {
        const needed = real[n + 1] - real[n];
        if (value[n + 1] - value[n] < needed) this.wrong(name, `leave room for document ${n} of length ${needed}`);
      }
      return value;
    }
    longest(name, real) {
      const limit = this.optional(name);
      const longest = Math.max(0, ...real.slice(1).map((one, at) => one - real[at]));
      if (limit !== null && limit < longest) this.wrong(name, `be at least the longest document (${longest})`);
    }
  }

  const CONSTRUCTORS = {
    causal: (args) => mask(args.align(), null, 0),
    window: (args) => mask(args.align(), args.side("left"), args.side("right")),
    lengths(args) {
      const kv = args.vector("kv", 0);
      const [q, kvStart, qStart] = ["q", "kv_start", "q_start"].map((name) => {
        const values = args.optionalVector(name, 0);
        args.sameLength(name, values, kv.length);
        return values;
      });
      if (qStart !== null && q === null) args.wrong("q", "be given with q_start");
      return mask(null, null, null, [{ kind: "lengths", kv, q, kvStart, qStart }]);
    },
    documents(args) {
      const q = args.offsets("cu_seqlens_q");
      const same = !args.has("cu_seqlens_kv");
      const kv = same ? q : args.offsets("cu_seqlens_kv");
      args.sameLength("cu_seqlens_kv", kv, q.length);
      const qSlots = args.slots("padded_q", q);
      const kvSlots = same && !args.has("padded_kv") ? qSlots : args.slots("padded_kv", kv);
      args.longest("max_q", q);
      args.longest("max_kv", kv);
      const totalQ = args.optional("total_q");
      const totalKv = same && !args.has("total_kv") ? totalQ : args.optional("total_kv");
      return mask(null, null, null, [{ kind: "documents", q, kv, qSlots, kvSlots, totalQ, totalKv }]);
    },
    document_ids(args) {
      const q = args.vector("ids_q");
      return mask(null, null, null, [{ kind: "document_ids", q, kv: args.has("ids_kv") ? args.vector("ids_kv") : q }]);
    },
    prefix: (args) => mask(null, null, null, [{ kind: "prefix", n: args.size("n", 0) }]),
    sinks: (args) => mask(args.align(), null, 0, [{ kind: "prefix", n: args.size("n", 0) }]),
    chunks(args) {
      const size = Math.min(args.integer("size", 1), INT32_MAX);
      const offset = args.has("offset") ? args.size("offset") : null;
      return mask(args.align(), null, null, [{ kind: "chunks", size, offset }]);
    },
    dense(args) {
      const rows = args.raw("tensor");
      const isMatrix = Array.isArray(rows) && rows.length && rows.every((row) => Array.isArray(row) && row.length &&
        row.length === rows[0].length && row.every((one) => one === true || one === false || one === 0 || one === 1));
      if (!isMatrix) args.wrong("tensor", "be rows of equal length of True and False (or 1 and 0)");
      return mask(null, null, null, [{ kind: "dense", rows: rows.map((row) => row.map(Boolean)) }]);
    },
    predicate(args) {
      const fn = args.raw("fn");
      if (!fn?.predicate) args.wrong("fn", "be a function, such as lambda b, h, q, k: (q + k) % 2 == 0");
      return mask(null, null, null, [{ kind: "predicate", run: fn.predicate }]);
    },
  };

  Object.assign(api.internal, { build });
})(globalThis.undividedMasks);
