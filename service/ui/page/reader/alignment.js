// Cuts the text of a message into the texts of its tokens. Pure functions.
//
// A vocabulary names each token in the spelling of its tokenizer: as it is, with a character for each byte (GPT-2 and
// those after it), or with U+2581 for a space (SentencePiece). Which one it is is found by what fits the content. Content
// has no special tokens: those fit nowhere and are shown by their names. What does not fit as a whole is said to.

const encoder = new TextEncoder();
const strict = new TextDecoder("utf-8", { fatal: true });
const lenient = new TextDecoder();
const REPLACEMENT = [0xef, 0xbf, 0xbd];
const BYTE_NAME = /^<0x([0-9A-Fa-f]{2})>$/;

/** By character, the byte that it stands for in a byte-level vocabulary. */
export const BYTE_OF = (() => {
  const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  const bytes = new Map();
  let further = 256;
  for (let byte = 0; byte < 256; byte += 1) bytes.set(String.fromCodePoint(printable(byte) ? byte : further++), byte);
  return bytes;
})();

const SPELLINGS = {
  byteLevel: (token) => {
    const bytes = [];
    for (const character of token) {
      const byte = BYTE_OF.get(character);
      if (byte === undefined) return null;
      bytes.push(byte);
    }
    return bytes;
  },
  sentencePiece: (token) => {
    const byte = BYTE_NAME.exec(token);
    return byte ? [parseInt(byte[1], 16)] : encoder.encode(token.replaceAll("\u2581", " "));
  },
  plain: (token) => encoder.encode(token),
};
const ORDER = ["byteLevel", "sentencePiece", "plain"];

function isAt(bytes, part, at) {
  if (!part || !part.length || at + part.length > bytes.length) return false;
  for (let index = 0; index < part.length; index += 1) if (bytes[at + index] !== part[index]) return false;
  return true;
}

function afterReplacements(bytes, at) {
  let next = at;
  while (isAt(bytes, REPLACEMENT, next)) next += REPLACEMENT.length;
  return next;
}

/** Where `token` ends if it is at `at`, with its spelling; null if it is not there. */
function match(bytes, at, token) {
  // Bytes that are no text were decoded to U+FFFD: what follows them may fit again.
  for (const from of new Set([at, afterReplacements(bytes, at)])) {
    for (const spelling of ORDER) {
      const part = SPELLINGS[spelling](token);
      if (isAt(bytes, part, from)) return { end: from + part.length, spelling };
    }
    // SentencePiece drops the space of the first token.
    if (from === 0 && token.startsWith("\u2581")) {
      const part = encoder.encode(token.slice(1));
      if (isAt(bytes, part, 0)) return { end: part.length, spelling: "sentencePiece" };
    }
  }
  return null;
}

/**
 * @param names of the tokens, null for one that the vocabulary has not
 * @returns `{pieces: [{text, special}], fits, spellings}`; a token that ends within a character has the text ""
 */
export function align(names, content) {
  const bytes = encoder.encode(content);
  const pieces = [];
  const spellings = {};
  let at = 0;
  let pending = 0;
  for (const name of names) {
    const found = name === null ? null : match(bytes, at, name);
    if (!found) {
      pieces.push({ text: name ?? "?", special: true });
      continue;
    }
    spellings[found.spelling] = (spellings[found.spelling] ?? 0) + 1;
    at = found.end;
    const text = decoded(bytes.subarray(pending, at));
    pieces.push({ text: text ?? "", special: false });
    if (text !== null) pending = at;
  }
  return { pieces, fits: afterReplacements(bytes, at) === bytes.length, spellings };
}

function decoded(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/** The text of each token by itself, where content and tokens do not fit, as in prompts that a template has changed. */
export function spelled(names, spelling) {
  return names.map((name) => {
    const bytes = name === null ? null : SPELLINGS[spelling](name);
    return bytes ? { text: lenient.decode(Uint8Array.from(bytes)), special: false } : { text: name ?? "?", special: true };
  });
}

/**
 * The pieces of every message, or null if the vocabulary is of another model: if it fits none of the generated messages.
 *
 * @param vocabulary token names by id
 */
export function piecesOf(messages, vocabulary) {
  const aligned = messages.map((message) => {
    const names = message.token_ids.map((id) => vocabulary[id] ?? null);
    return { names, generated: Array.isArray(message.generation_logprobs), ...align(names, message.content ?? "") };
  });
  const generated = aligned.filter((one) => one.generated && one.names.length);
  const judged = generated.length ? generated : aligned;
  const votes = {};
  for (const { spellings } of judged.filter((one) => one.fits)) {
    for (const [spelling, number] of Object.entries(spellings)) votes[spelling] = (votes[spelling] ?? 0) + number;
  }
  if (!judged.some((one) => one.fits && Object.keys(one.spellings).length)) return null;
  const spelling = ORDER.reduce((best, one) => ((votes[one] ?? 0) > (votes[best] ?? 0) ? one : best));
  return aligned.map((one) => {
    const alone = spelled(one.names, spelling);
    if (!one.fits) return alone;
    // What is not in the content is written as it reads, not as the vocabulary spells it.
    return one.pieces.map((piece, at) => (piece.special ? { ...alone[at], special: true } : piece));
  });
}
