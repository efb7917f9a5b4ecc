// Where a text stops being JSON. Browsers say it in different words, or not at all.

const SPACE = /[ \t\n\r]*/y;
const TEXT = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const PLAIN = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;

class Flaw {
  constructor(at, wanted) {
    this.at = at;
    this.wanted = wanted;
  }
}

/** `{line, column, wanted}` of the first place that is wrong, both from 1. The text is known to be no JSON. */
export function firstFlaw(text) {
  let flaw;
  try {
    const end = space(text, value(text, 0));
    flaw = new Flaw(end, "the end");
  } catch (thrown) {
    if (!(thrown instanceof Flaw)) throw thrown;
    flaw = thrown;
  }
  const before = text.slice(0, flaw.at).split("\n");
  return { line: before.length, column: before.at(-1).length + 1, wanted: flaw.wanted };
}

// Each of these returns where what it has read ends, or throws a `Flaw`.

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.test(text) ? pattern.lastIndex : -1;
}

function space(text, at) {
  return match(SPACE, text, at);
}

function value(text, at) {
  const begin = space(text, at);
  if (text[begin] === "{") return list(text, begin, "}", member);
  if (text[begin] === "[") return list(text, begin, "]", value);
  if (text[begin] === '"') return string(text, begin, "a text that ends");
  const end = match(PLAIN, text, begin);
  if (end < 0) throw new Flaw(begin, "a value");
  return end;
}

function string(text, at, wanted) {
  const end = match(TEXT, text, at);
  if (end < 0) throw new Flaw(at, wanted);
  return end;
}

function member(text, at) {
  const colon = space(text, string(text, space(text, at), 'a name in " "'));
  if (text[colon] !== ":") throw new Flaw(colon, "a colon");
  return value(text, colon + 1);
}

function list(text, begin, close, item) {
  let at = space(text, begin + 1);
  if (text[at] === close) return at + 1;
  for (;;) {
    at = space(text, item(text, at));
    if (text[at] === close) return at + 1;
    if (text[at] !== ",") throw new Flaw(at, `a comma or ${close}`);
    at += 1;
  }
}
