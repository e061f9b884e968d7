// Expressions of masks: tokens and trees, never evaluated as code.
//
// The grammar is that of `undivided mask`: calls of the constructors, joined by & and |.
(function (api) {
  "use strict";

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

  Object.assign(api.internal, { INT32_MAX, MaskError, count, EXAMPLE, parseTree, CALLS, PARAMETERS });
  Object.assign(api, { parse: parseTree, MaskError, constructors: PARAMETERS });
})(globalThis.undividedMasks = { internal: {} });
