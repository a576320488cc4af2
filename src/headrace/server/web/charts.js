// Charts on canvas. Colours are the page's own, read when drawn, so that they follow the colour scheme.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A canvas made as sharp as the screen, and its size in CSS pixels.
function begin(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function grid(context, width, height) {
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (const part of [0.5, 1]) {
    const y = Math.round(height - part * (height - 14)) + 0.5;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
  }
}

// Over what is drawn, with a rim of the ground's colour so that it can be read there.
function scale(context, height, most, label) {
  context.strokeStyle = colour("surface");
  context.fillStyle = colour("soft");
  context.lineWidth = 3;
  context.lineJoin = "round";
  for (const part of [0.5, 1]) {
    const y = Math.round(height - part * (height - 14)) - 2.5;
    context.strokeText(label(most * part), 3, y);
    context.fillText(label(most * part), 3, y);
  }
}

export const BAR = 5; // CSS pixels of a bar and the gap after it

export const visible = (canvas) => Math.max(1, Math.floor(canvas.getBoundingClientRect().width / BAR));

// Bars from the right, latest last. `parts` gives [height, colour] pairs, stacked from the bottom.
export function bars(canvas, items, parts, label, selected = -1) {
  const { context, width, height } = begin(canvas);
  const stacks = items.map(parts);
  const sums = stacks.map((stack) => stack.reduce((sum, [value]) => sum + value, 0)).sort((a, b) => a - b);
  // one outlier must not flatten the rest: the scale is that of the 98th percentile, and taller bars are cut
  const most = nice(Math.max(sums[Math.floor((sums.length - 1) * 0.98)] ?? 0, 1e-6));
  grid(context, width, height);
  const left = width - items.length * BAR;
  stacks.forEach((stack, index) => {
    let y = height;
    for (const [value, name] of stack) {
      const size = Math.min(y, Math.max(value > 0 ? 1 : 0, (value / most) * (height - 14)));
      context.fillStyle = colour(name);
      context.fillRect(left + index * BAR, y - size, BAR - 1, size);
      y -= size;
    }
    if (index === selected) {
      context.strokeStyle = colour("text");
      context.strokeRect(left + index * BAR - 1.5, 0.5, BAR + 1, height - 1);
    }
  });
  scale(context, height, most, label);
}

// Lines over time, the area under the first one filled; `series` are [values, colour] pairs of equal length.
export function lines(canvas, series, most, label) {
  const { context, width, height } = begin(canvas);
  const top = nice(Math.max(most, 1e-9));
  grid(context, width, height);
  const count = Math.max(2, series[0][0].length);
  series.forEach(([values, name], number) => {
    context.beginPath();
    values.forEach((value, index) => {
      const x = (width * (index + count - values.length)) / (count - 1);
      const y = height - Math.min(1, value / top) * (height - 14) - 1;
      if (index) context.lineTo(x, y);
      else context.moveTo(x, y);
    });
    context.strokeStyle = context.fillStyle = colour(name);
    context.lineWidth = 1.6;
    context.stroke();
    if (!number && values.length > 1) {
      context.globalAlpha = 0.15;
      context.lineTo(width, height);
      context.lineTo(0, height);
      context.fill();
      context.globalAlpha = 1;
    }
  });
  scale(context, height, top, label);
}
