// The images of a message. A rollout has their names; the service has the files, as long as it keeps them.

import { h } from "../app/dom.js";
import { call } from "../service/api.js";

const NAME = /^sha256:[0-9a-f]{64}$/;
const NAME_SHOWN = "sha256:".length + 8;
const MOST_KEPT = 128;
const addresses = new Map();

/** A figure for each image, with the range of tokens that stand for it. */
export function picturesOf(message) {
  return (message.mm_ranges ?? []).filter(({ media }) => NAME.test(media)).map(figure);
}

/** As the inspector counts tokens: from 1. */
export function captionOf({ media, start, end }) {
  return `image ${media.slice(0, NAME_SHOWN)}… · tokens ${start + 1}–${end}`;
}

function figure(range) {
  const caption = h("figcaption", { class: "small quiet", title: range.media }, captionOf(range));
  const element = h("figure", { class: "picture" }, caption);
  addressOf(range.media).then(
    (src) => element.prepend(h("img", { src, alt: captionOf(range) })),
    ({ message }) => caption.append(` · not shown: ${message}`),
  );
  return element;
}

/** An <img> sends no key: the file is fetched with it, once, and shown from memory. */
function addressOf(name) {
  let address = addresses.get(name);
  if (!address) {
    address = call(`blobs/${name}`, { quiet: true }).then(async (response) => URL.createObjectURL(await response.blob()));
    // Asked again with the next rollout: a key may be given until then.
    address.catch(() => addresses.delete(name));
    addresses.set(name, address);
    if (addresses.size > MOST_KEPT) forgetOldest();
  }
  return address;
}

function forgetOldest() {
  const [name, address] = addresses.entries().next().value;
  addresses.delete(name);
  address.then(URL.revokeObjectURL, () => {});
}
