// What `cargo xtask web` puts into `dist/vendor`, by its own declarations.
export { default } from "uplot";
