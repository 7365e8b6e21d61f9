// Numbers as people read them. Sizes are binary, as everywhere in the engine, and come with the exact bytes in a title.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/**
 * Three digits and a unit: `1.66 MiB`.
 * @param {number} n
 */
export function bytes(n) {
  let unit = 0;
  let value = n;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(value) : digits(value)} ${UNITS[unit]}`;
}

/**
 * `1,739,468 bytes`, for titles.
 * @param {number} n
 */
export const exactBytes = (n) => `${whole.format(n)} bytes`;

/** @param {number} n */
export const count = (n) => whole.format(n);

/**
 * Three digits: `0.123`, `1.23`, `12.3`, `123`.
 * @param {number} n
 */
export function digits(n) {
  if (!Number.isFinite(n)) return "–";
  const size = Math.abs(n);
  return size >= 100 ? whole.format(n) : n.toFixed(size >= 10 ? 1 : 2);
}

/**
 * Parameters, roughly: `2.6 M`.
 * @param {number} n
 */
export function roughly(n) {
  if (n >= 1e9) return `${digits(n / 1e9)} billion`;
  if (n >= 1e6) return `${digits(n / 1e6)} million`;
  return whole.format(n);
}

/** @param {number} ms */
export function duration(ms) {
  if (ms < 1000) return `${digits(ms)} ms`;
  if (ms < 60_000) return `${digits(ms / 1000)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

/**
 * @param {number} n
 * @param {string} one
 * @param {string} [many]
 */
export const plural = (n, one, many = `${one}s`) => `${whole.format(n)} ${n === 1 ? one : many}`;
