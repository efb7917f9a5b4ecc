// The names of the tokens: those of the service's model, or of a `tokenizer.json` that was dropped on the page.

import { get } from "../service/api.js";

export class VocabularyStore {
  #ofService = null;
  #dropped = null;
  taken = 0;

  /** The names by id; null where neither a file nor the service gives them. Asks the service once. */
  async names() {
    if (this.#dropped) return this.#dropped;
    this.#ofService ??= get("info/vocabulary").then(
      ({ tokens }) => tokens,
      () => {
        // Asked again with the next rollout: a key may be given until then.
        this.#ofService = null;
        return null;
      },
    );
    return this.#ofService;
  }

  /** Takes the vocabulary of a Hugging Face `tokenizer.json`. Throws an `Error` if it is none. */
  take(tokenizer) {
    this.#dropped = namesOf(tokenizer);
    this.taken += 1;
  }
}

export function namesOf(tokenizer) {
  const vocabulary = tokenizer?.model?.vocab;
  if (!vocabulary) throw new Error("it has no model.vocab");
  const names = [];
  if (Array.isArray(vocabulary)) vocabulary.forEach(([name], id) => (names[id] = name));
  else for (const [name, id] of Object.entries(vocabulary)) names[id] = name;
  for (const { id, content } of tokenizer.added_tokens ?? []) names[id] = content;
  return names;
}
