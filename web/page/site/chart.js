// What all charts share: colours of the page, size of their place, and words for those who do not see them.

import uPlot from "./vendor/uPlot.esm.js";
import { darkness, eachFrame } from "./dom.js";

/**
 * A colour of the style sheet.
 * @param {string} name
 */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

const FONT = "12px system-ui, sans-serif";

/**
 * @param {uPlot.Axis} [more]
 * @returns {uPlot.Axis}
 */
export const axis = (more = {}) => ({
  stroke: () => colour("--muted"),
  font: FONT,
  grid: { stroke: () => colour("--line"), width: 1 },
  ticks: { show: false },
  size: 30,
  ...more,
});

/**
 * A chart that fills its place and draws at most once a frame.
 * @param {HTMLElement} place
 * @param {Omit<uPlot.Options, "width" | "height">} options
 * @param {() => uPlot.AlignedData} read what is to be drawn
 * @param {() => string} describe
 * @returns {() => void} draws it anew
 */
export function chart(place, options, read, describe) {
  const size = () => ({ width: Math.max(80, place.clientWidth), height: Math.max(80, place.clientHeight) });
  const plot = new uPlot({ ...options, ...size(), legend: { show: false } }, read(), place);
  place.classList.add("blank");
  place.ariaLabel = describe();
  const draw = eachFrame(() => {
    const data = read();
    place.classList.toggle("blank", data[0].length === 0);
    plot.setData(data);
    place.ariaLabel = describe();
  });
  new ResizeObserver(() => plot.setSize(size())).observe(place);
  darkness.addEventListener("change", () => plot.redraw(false));
  return draw;
}
