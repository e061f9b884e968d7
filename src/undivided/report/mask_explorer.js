// The mask explorer: masks of undivided.masks as ranges of keys per row, computed and drawn in the browser.
//
// One file without dependencies. `window.undividedMasks` has the functions; every element with the attribute
// `data-mask-explorer` becomes an explorer (its value is the first expression). In Node.js, `require` returns the same
// functions. Expressions have the grammar of `undivided mask`: calls of the constructors, joined by & and |. They are
// parsed here and never evaluated as code. The tests compare every constructor with undivided.masks.
//
// Positions: i and j are the indices of a query row and a key; i' and j' count within a sequence (a batch element or a
// document). The row's own key is i' + d; d depends on the alignment.
(function () {
  "use strict";

  // ---------------------------------------------------------------------------------------------- the grammar

  const INT32_MAX = 2 ** 31 - 1;
  const INT64_MAX = 2n ** 63n - 1n;
  const EXAMPLE = 8; // queries and keys of a mask that has no lengths of its own

  const PARAMETERS = {
    causal: ["align"],
    window: ["left", "right", "align"],
    lengths: ["kv", "q", "kv_start", "q_start"],
    documents: [
      "cu_seqlens_q", "cu_seqlens_kv", "padded_q", "padded_kv", "max_q", "max_kv", "total_q", "total_kv",
    ],
    document_ids: ["ids_q", "ids_kv"],
    prefix: ["n"],
    sinks: ["n", "align"],
    chunks: ["size", "align", "offset"],
    dense: ["tensor"],
    predicate: ["fn"],
  };
  const REQUIRED = {
    causal: 0, window: 2, lengths: 1, documents: 1, document_ids: 1, prefix: 1, sinks: 1, chunks: 1, dense: 1,
    predicate: 1,
  };
  const CALLS = Object.keys(PARAMETERS);

  /** An expression that is not a mask. `position` is the index of the first wrong character. */
  class MaskError extends Error {
    constructor(message, position) {
      super(message);
      this.name = "MaskError";
      this.position = position;
    }
  }

  const OPERATORS = ["//", "==", "!=", "<=", ">=", "<<", ">>", ..."&|()[],=-+*%<>^~:"];

  function tokenize(text) {
    const tokens = [];
    let at = 0;
    let depth = 0;
    while (at < text.length) {
      const rest = text.slice(at);
      const blank = /^(?:[ \t\f\r]+|#[^\n]*)/.exec(rest);
      if (blank) {
        at += blank[0].length;
        continue;
      }
      if (rest[0] === "\n") {
        if (depth === 0 && text.slice(at).replace(/#[^\n]*/g, "").trim() && tokens.length) {
          throw new MaskError("an expression must be one line; a line break is allowed inside of brackets", at);
        }
        at += 1;
        continue;
      }
      const name = /^[A-Za-z_][A-Za-z0-9_]*/.exec(rest);
      const number = /^(?:0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+|[0-9](?:_?[0-9])*)/.exec(rest);
      const quoted = /^(?:'([^'\\\n]*)'|"([^"\\\n]*)")/.exec(rest);
      if (name) {
        tokens.push({ kind: "name", text: name[0], at });
        at += name[0].length;
      } else if (number) {
        tokens.push({ kind: "number", text: number[0], value: integer(number[0], text, at), at });
        at += number[0].length;
      } else if (quoted) {
        tokens.push({ kind: "string", text: quoted[0], value: quoted[1] ?? quoted[2], at });
        at += quoted[0].length;
      } else {
        const operator = OPERATORS.find((one) => rest.startsWith(one));
        if (!operator) throw new MaskError(unexpected(rest[0]), at);
        depth += "([".includes(operator) ? 1 : ")]".includes(operator) ? -1 : 0;
        tokens.push({ kind: operator, text: operator, at });
        at += operator.length;
      }
    }
    tokens.push({ kind: "end", text: "", at: text.trimEnd().length });
    return tokens;
  }

  function unexpected(character) {
    if (`'"`.includes(character)) return "this text has no closing quote, or contains a backslash";
    return `the character ${JSON.stringify(character)} has no meaning in a mask`;
  }

  function integer(digits, text, at) {
    const after = text.slice(at + digits.length);
    if (/^[.eEjJ]/.test(after)) throw new MaskError("numbers must be whole", at);
    if (/^[A-Za-z0-9_]/.test(after)) throw new MaskError(`'${digits}${after[0]}' is not a number`, at);
    if (/^0[0-9_]*[1-9]/.test(digits)) throw new MaskError("a decimal number must not start with 0", at);
    const value = BigInt(digits.replace(/_/g, ""));
    if (value > INT64_MAX) throw new MaskError("numbers must fit into 64 bits", at);
    return Number(value);
  }

  /** The tree of an expression. Nodes: {kind: "&" | "|", left, right} and {kind: "call", name, arguments}. */
  function parseTree(text) {
    const tokens = tokenize(text);
    let next = 0;
    const peek = () => tokens[next];
    const take = () => tokens[next++];
    const end = () => tokens[next - 1].at + tokens[next - 1].text.length;

    function fail(what, token = peek()) {
      const actual = token.kind === "end" ? "the end" : `'${token.text}'`;
      throw new MaskError(`expected ${what}, found ${actual}`, token.at);
    }
    function expect(kind, what) {
      return peek().kind === kind ? take() : fail(what);
    }
    function joined(operator, operand) {
      const start = peek().at;
      let node = operand();
      while (peek().kind === operator) {
        const at = take().at;
        node = { kind: operator, left: node, right: operand(), start, at };
        node.end = end();
      }
      return node;
    }
    const union = () => joined("|", intersection);
    const intersection = () => joined("&", atom);

    function atom() {
      if (peek().kind === "(") {
        take();
        const inner = union();
        expect(")", "')'");
        return inner;
      }
      if (peek().kind !== "name") fail("a mask, such as causal()");
      const name = take();
      if (!CALLS.includes(name.text)) {
        const close = closest(name.text, CALLS);
        const hint = close ? `did you mean ${close}?` : `the masks are ${CALLS.join(", ")}`;
        throw new MaskError(`there is no mask '${name.text}': ${hint}`, name.at);
      }
      const node = { kind: "call", name: name.text, start: name.at, arguments: {} };
      if (peek().kind === "(") readArguments(node);
      node.end = end();
      node.text = text.slice(node.start, node.end);
      const known = PARAMETERS[node.name];
      const missing = known.slice(0, REQUIRED[node.name]).filter((one) => !(one in node.arguments));
      if (missing.length) throw new MaskError(`${node.name} needs ${missing.join(" and ")}`, node.start);
      return node;
    }

    function readArguments(node) {
      const known = PARAMETERS[node.name];
      take();
      let position = 0;
      let named = false;
      while (peek().kind !== ")") {
        const first = peek();
        let parameter;
        if (first.kind === "name" && tokens[next + 1].kind === "=") {
          named = true;
          parameter = take().text;
          take();
          if (!known.includes(parameter)) {
            throw new MaskError(`${node.name} has no argument '${parameter}': it takes ${known.join(", ")}`, first.at);
          }
        } else {
          if (named) throw new MaskError("an argument without a name must come before those with one", first.at);
          if (position === known.length) {
            throw new MaskError(`${node.name} takes at most ${count(known.length, "argument")}`, first.at);
          }
          parameter = known[position++];
        }
        if (parameter in node.arguments) throw new MaskError(`${parameter} is given twice`, first.at);
        const at = peek().at;
        node.arguments[parameter] = { value: argument(), at };
        if (peek().kind !== ",") break;
        take();
      }
      expect(")", "',' or ')'");
    }

    function argument() {
      return peek().kind === "name" && peek().text === "lambda" ? lambda() : value();
    }

    function value() {
      const token = take();
      if (token.kind === "-" || token.kind === "+") {
        if (peek().kind === "(") {
          take();
          const inside = expect("number", "a number").value;
          expect(")", "')'");
          return token.kind === "-" ? -inside : inside;
        }
        const number = expect("number", "a number").value;
        return token.kind === "-" ? -number : number;
      }
      if (token.kind === "number") return token.value;
      if (token.kind === "string") {
        let joinedText = token.value;
        while (peek().kind === "string") joinedText += take().value;
        return joinedText;
      }
      if (token.kind === "name" && ["None", "True", "False"].includes(token.text)) {
        return { None: null, True: true, False: false }[token.text];
      }
      if (token.kind === "[") return list("]", []);
      if (token.kind === "(") {
        if (peek().kind === ")") return list(")", []);
        const first = value();
        if (peek().kind === ")") {
          take();
          return first;
        }
        expect(",", "',' or ')'");
        return list(")", [first]);
      }
      return fail("a number, a list, a text in quotes or None", token);
    }

    function list(close, items) {
      while (peek().kind !== close) {
        items.push(value());
        if (peek().kind !== ",") break;
        take();
      }
      expect(close, `',' or '${close}'`);
      return items;
    }

    /** The function of `lambda b, h, q, k: ...`: comparisons and arithmetic of whole numbers. */
    function lambda() {
      const names = [];
      take();
      while (names.length < 4) {
        const name = expect("name", "the name of an index");
        if (names.includes(name.text)) throw new MaskError(`'${name.text}' is given twice`, name.at);
        names.push(name.text);
        if (names.length < 4) expect(",", "',': the function takes the four indices b, h, q, k");
      }
      expect(":", "':' after the four indices b, h, q, k");
      const at = peek().at;
      const result = comparison(names);
      if (result.kind !== "bool") throw new MaskError("the function must return True or False: compare numbers", at);
      return { predicate: result.run };
    }

    function comparison(names) {
      const left = bitwise(names, 0);
      const operator = COMPARISONS[peek().kind];
      if (!operator) return left;
      take();
      const right = bitwise(names, 0);
      if (COMPARISONS[peek().kind]) {
        throw new MaskError("compare two numbers at a time, and join comparisons in brackets by &", peek().at);
      }
      return { kind: "bool", run: (x) => operator(left.run(x), right.run(x)) };
    }

    function bitwise(names, level) {
      if (level === 3) return sum(names);
      const sign = "|^&"[level];
      let left = bitwise(names, level + 1);
      while (peek().kind === sign) {
        const at = take().at;
        left = joinedBits(sign, left, bitwise(names, level + 1), at);
      }
      return left;
    }

    function sum(names) {
      let left = product(names);
      while (["+", "-"].includes(peek().kind)) {
        const token = take();
        const [a, b] = [number(left, token.at), number(product(names), token.at)];
        left = { kind: "int", run: token.kind === "+" ? (x) => a(x) + b(x) : (x) => a(x) - b(x) };
      }
      return left;
    }

    function product(names) {
      let left = unary(names);
      while (["*", "//", "%"].includes(peek().kind)) {
        const token = take();
        const a = number(left, token.at);
        const divisorAt = peek().at;
        const right = unary(names);
        const b = number(right, divisorAt);
        if (token.kind === "*") {
          left = { kind: "int", run: (x) => a(x) * b(x) };
          continue;
        }
        if (!right.constant) throw new MaskError(`the number after ${token.kind} must be a positive constant`, divisorAt);
        const by = right.constant;
        const quotient = (x) => Math.floor(a(x) / by);
        left = { kind: "int", run: token.kind === "//" ? quotient : (x) => a(x) - quotient(x) * by };
      }
      return left;
    }

    function unary(names) {
      const token = take();
      if (token.kind === "number") return { kind: "int", constant: token.value, run: () => token.value };
      if (token.kind === "-") {
        const a = number(unary(names), token.at);
        return { kind: "int", run: (x) => -a(x) };
      }
      if (token.kind === "~") {
        const inner = unary(names);
        if (inner.kind !== "bool") throw new MaskError("~ must stand before a comparison in brackets", token.at);
        return { kind: "bool", run: (x) => !inner.run(x) };
      }
      if (token.kind === "(") {
        const inner = comparison(names);
        expect(")", "')'");
        return inner;
      }
      const index = token.kind === "name" ? names.indexOf(token.text) : -1;
      if (index < 0) fail(`a number, one of ${names.join(", ")}, or a comparison in brackets`, token);
      return { kind: "int", run: (x) => x[index] };
    }

    if (peek().kind === "end") fail("a mask, such as causal()");
    const tree = union();
    if (peek().kind !== "end") fail("&, | or the end");
    return tree;
  }

  const COMPARISONS = {
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
    "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  };

  function number(operand, at) {
    if (operand.kind !== "int") throw new MaskError("arithmetic needs whole numbers, not comparisons", at);
    return operand.run;
  }

  function joinedBits(sign, left, right, at) {
    if (left.kind !== "bool" || right.kind !== "bool") {
      throw new MaskError(`${sign} must join two comparisons in brackets`, at);
    }
    const [a, b] = [left.run, right.run];
    if (sign === "&") return { kind: "bool", run: (x) => a(x) && b(x) };
    if (sign === "|") return { kind: "bool", run: (x) => a(x) || b(x) };
    return { kind: "bool", run: (x) => a(x) !== b(x) };
  }

  function closest(word, known) {
    const distances = known.map((other) => [distance(word.toLowerCase(), other), other]).sort((a, b) => a[0] - b[0]);
    return distances[0][0] <= Math.max(2, word.length / 3) ? distances[0][1] : null;
  }

  function distance(a, b) {
    let row = [...Array(b.length + 1).keys()];
    for (let i = 1; i <= a.length; i++) {
      const above = row;
      row = [i];
      for (let j = 1; j <= b.length; j++) {
        row.push(Math.min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
      }
    }
    return row[b.length];
  }

  const count = (number, unit, units = `${unit}s`) => `${number} ${number === 1 ? unit : units}`;

  // ------------------------------------------------------------------------------------- masks and their rules

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

  // ------------------------------------------------------------------------------- sizes, sequences, alignment

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

  // -------------------------------------------------------------------------------------------------- ranges

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

  const api = { ranges, compute, explain, tiles, python, parse: parseTree, MaskError, constructors: PARAMETERS };

  // ----------------------------------------------------------------------------------------------- the explorer

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

  if (typeof module !== "undefined" && module.exports) module.exports = api;
  if (typeof window !== "undefined") window.undividedMasks = api;
})();
