//! `cargo xtask web`: builds the page into `dist`, which any static host can serve, and serves it on localhost.

use crate::serve;
use crate::setup::{self, WasmToolchain};
use crate::shell::{Failure, root, say, step};
use std::path::Path;

/// What to do with the page.
#[derive(Debug, PartialEq)]
pub struct Options {
    build_only: bool,
    port: u16,
}

impl Options {
    /// From the command line.
    pub fn parse(args: &[String]) -> Result<Self, Failure> {
        let mut options = Self { build_only: false, port: 8000 };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--build-only" => options.build_only = true,
                "--port" => {
                    let port = args.next().and_then(|text| text.parse().ok());
                    options.port = port.ok_or_else(|| Failure::usage("--port wants a number from 0 to 65535"))?;
                }
                other => {
                    return Err(Failure::usage(format!("unknown flag `{other}`; see `cargo xtask help`")));
                }
            }
        }
        Ok(options)
    }
}

/// Sets up, builds, and serves unless told not to.
pub fn run(options: &Options) -> Result<(), Failure> {
    let toolchain = setup::wasm_toolchain()?;
    let tools = setup::wasm_bindgen()?;
    build(&toolchain, &tools)?;
    if options.build_only {
        return Ok(());
    }
    serve::run(&root().join("dist"), options.port)
}

/// Compiles the engine for the web and puts it beside the page's own files, in a new `dist`.
pub fn build(toolchain: &WasmToolchain, tools: &Path) -> Result<(), Failure> {
    toolchain.cargo("build").args(["--package", "ebbtide-web", "--lib", "--release"]).run()?;
    let dist = root().join("dist");
    let io = |what: &str, e: std::io::Error| Failure::new(format!("{what}: {e}"));
    if dist.exists() {
        std::fs::remove_dir_all(&dist).map_err(|e| io("dist could not be emptied", e))?;
    }
    copy_dir(&root().join("web/page"), &dist).map_err(|e| io("web/page could not be copied to dist", e))?;
    let module = toolchain.target_dir().join("wasm32-unknown-unknown/release/ebbtide_web.wasm");
    step(tools.join("wasm-bindgen"))
        .args(["--target", "web", "--no-typescript", "--out-dir"])
        .args([&dist, &module])
        .run()?;
    let size = |name: &str| std::fs::metadata(dist.join(name)).map(|m| m.len() as f64 / 1e6).unwrap_or(0.0);
    say(&format!(
        "built {}: wasm {:.2} MB, script {:.2} MB",
        dist.display(),
        size("ebbtide_web_bg.wasm"),
        size("ebbtide_web.js")
    ));
    Ok(())
}

fn copy_dir(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_no_number_is_a_usage_error() {
        let parse = |args: &[&str]| Options::parse(&args.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        assert_eq!(parse(&["--port", "x"]).err().map(|f| f.status), Some(2));
        assert_eq!(parse(&["--port", "0", "--build-only"]).ok(), Some(Options { build_only: true, port: 0 }));
    }
}
