// What `cargo xtask web` puts into `dist/vendor`, by its own declarations.
export * from "client-zip";
