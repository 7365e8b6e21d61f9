// What a visitor downloads before the page can work: engine and scripts, compressed as a server would. Fails beyond the
// limit, so that a dependency that grows the engine is noticed by whoever adds it.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const LIMIT = 3_000_000;
const folder = process.argv[2] ?? "dist";
let total = 0;
const wanted = /\.(wasm|js|css|html|svg)$/;
for (const name of readdirSync(folder, { recursive: true, encoding: "utf8" }).filter((name) => wanted.test(name)).sort()) {
  const bytes = readFileSync(join(folder, name));
  const packed = gzipSync(bytes, { level: 9 }).length;
  total += packed;
  if (packed > 10_000) console.log(`${name}: ${bytes.length} bytes, ${packed} compressed`);
}
console.log(`all of the page, the model apart: ${total} bytes compressed, of ${LIMIT} allowed`);
if (total > LIMIT) {
  console.error("The page has become too large: see what grew, or raise the limit knowingly in web/page/size.js.");
  process.exit(1);
}
