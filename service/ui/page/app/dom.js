// Builds elements. Text is always text: nothing here reads markup, because most texts come from models.

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "textContent", "className"]);

/** `h("p", {class: "quiet", onclick: go}, "text", child)`. Attributes that are null or false are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A control with its label above it. */
export function field(label, control) {
  control.id ||= `field-${(field.count = (field.count ?? 0) + 1)}`;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

export function options(select, choices, chosen) {
  select.replaceChildren(
    ...choices.map(([value, label]) => h("option", { value, selected: value === chosen }, label)),
  );
}
