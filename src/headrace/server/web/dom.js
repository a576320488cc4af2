// A small way to make elements. Text is always text: nothing in this page sets HTML from a string.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`.replace(/\.0+ /, " ");
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export const percent = (part) => `${Math.round(part * 100)} %`;
