// Reads Prometheus's text form, and quantiles of what a histogram gained between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)/;

// {name: [[labels, value], ...]}
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)) labels[name] = value;
    (found[match[1]] ??= []).push([labels, Number(match[3])]);
  }
  return found;
}

export const single = (page, name) => page[name]?.[0][1] ?? 0;

const buckets = (page, name) =>
  (page[`${name}_bucket`] ?? []).map(([labels, count]) => [labels.le === "+Inf" ? Infinity : Number(labels.le), count]);

// Quantiles as Prometheus's histogram_quantile estimates them; NaN where nothing was counted in between.
export function quantiles(before, after, name, wanted) {
  const old = new Map(before ? buckets(before, name) : []);
  const gained = buckets(after, name).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const total = gained.at(-1)?.[1] ?? 0;
  return wanted.map((quantile) => {
    if (!(total > 0)) return NaN;
    const rank = quantile * total;
    const at = gained.findIndex(([, count]) => count >= rank);
    const [bound, count] = gained[at];
    const [low, under] = at ? gained[at - 1] : [0, 0];
    if (bound === Infinity) return low;
    return low + ((bound - low) * (rank - under)) / (count - under || 1);
  });
}
