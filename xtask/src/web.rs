//! `cargo xtask web`: builds the page into `dist`, which any static host can serve, and serves it on localhost.
//!
//! `dist` is made anew each time from what is in the repository and in npm's lock file, and nothing else. What a visitor
//! downloads before the page can do anything is held to a size, and what the page may connect to is fixed here: a page
//! that shows a model's data to another origin by mistake would break its only promise to the visitor.

use crate::serve::{self, Site};
use crate::setup::{self, WasmToolchain};
use crate::shell::{Failure, root, say, step};
use std::path::{Path, PathBuf};

/// What to do with the page.
#[derive(Debug, PartialEq)]
pub struct Options {
    build_only: bool,
    port: u16,
    origins: Vec<String>,
}

impl Options {
    /// From the command line.
    pub fn parse(args: &[String]) -> Result<Self, Failure> {
        let mut options = Self { build_only: false, port: 8000, origins: Vec::new() };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--build-only" => options.build_only = true,
                "--port" => {
                    let port = args.next().and_then(|text| text.parse().ok());
                    options.port = port.ok_or_else(|| Failure::usage("--port wants a number from 0 to 65535"))?;
                }
                "--allow-origin" => {
                    let origin = args.next().filter(|text| is_origin(text));
                    options.origins.push(origin.cloned().ok_or_else(|| {
                        Failure::usage(
                            "--allow-origin wants an origin, as https://example.org or http://localhost:9000",
                        )
                    })?);
                }
                other => {
                    return Err(Failure::usage(format!("unknown flag `{other}`; see `cargo xtask help`")));
                }
            }
        }
        Ok(options)
    }
}

/// Scheme, host and port, and nothing that could end the policy's directive and begin another.
fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or("");
    !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-:[]".contains(c))
}

/// The content security policy, sent with every file; `index.html` carries it too, for hosts that cannot send headers.
/// Scripts and data are the page's own; models may come from the origins that were named when it was built.
fn policy(origins: &[String]) -> String {
    let mut text = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'".to_owned();
    for origin in origins {
        text.push(' ');
        text.push_str(origin);
    }
    text
}

/// What the page is built with.
pub struct Tools {
    /// How to compile for the web.
    pub toolchain: WasmToolchain,
    /// The folder of wasm-bindgen's programs.
    pub wasm_bindgen: PathBuf,
    /// The folder of npm's packages.
    pub packages: PathBuf,
}

impl Tools {
    /// Installs what is missing.
    pub fn set_up() -> Result<Self, Failure> {
        let toolchain = setup::wasm_toolchain()?;
        Ok(Self { toolchain, wasm_bindgen: setup::wasm_bindgen()?, packages: setup::node_packages()? })
    }
}

/// What the page takes from npm: its file there, and in `dist/vendor`.
const VENDOR: [(&str, &str); 5] = [
    ("uplot/dist/uPlot.esm.js", "uPlot.esm.js"),
    ("uplot/dist/uPlot.min.css", "uPlot.css"),
    ("uplot/LICENSE", "uPlot.LICENSE.txt"),
    ("client-zip/index.js", "client-zip.js"),
    ("client-zip/LICENSE.txt", "client-zip.LICENSE.txt"),
];

/// Sets up, builds, and serves unless told not to.
pub fn run(options: &Options) -> Result<(), Failure> {
    let site = build(&Tools::set_up()?, &options.origins)?;
    if options.build_only {
        return Ok(());
    }
    serve::run(&site, options.port)
}

/// Compiles the engine for the web and puts it into a new `dist`, with the page's own files, the chart library, the tiny
/// model and its training data.
pub fn build(tools: &Tools, origins: &[String]) -> Result<Site, Failure> {
    tools.toolchain.cargo("build").args(["--package", "ebbtide-web", "--lib", "--release"]).run()?;
    let site = Site { folder: root().join("dist"), policy: policy(origins) };
    copy_files(tools, &site).map_err(|e| Failure::new(format!("dist could not be made: {e}")))?;
    let module = tools.toolchain.target_dir().join("wasm32-unknown-unknown/release/ebbtide_web.wasm");
    step(tools.wasm_bindgen.join("wasm-bindgen"))
        .args(["--target", "web", "--no-typescript", "--out-dir"])
        .args([&site.folder, &module])
        .run()?;
    step("node").args([&root().join("web/page/size.js"), &site.folder]).run()?;
    say(&format!("built {}", site.folder.display()));
    Ok(site)
}

fn copy_files(tools: &Tools, site: &Site) -> std::io::Result<()> {
    let dist = &site.folder;
    if dist.exists() {
        std::fs::remove_dir_all(dist)?;
    }
    copy_dir(&root().join("web/page/site"), dist)?;
    let index = dist.join("index.html");
    let page = std::fs::read_to_string(&index)?;
    std::fs::write(&index, page.replace(&policy(&[]), &site.policy))?;
    std::fs::create_dir_all(dist.join("vendor"))?;
    for (from, name) in VENDOR {
        std::fs::copy(tools.packages.join(from), dist.join("vendor").join(name))?;
    }
    let assets = root().join("native/assets");
    copy_dir(&assets.join("tiny-shakespeare-llama"), &dist.join("model"))?;
    std::fs::create_dir_all(dist.join("data"))?;
    for name in ["train.jsonl", "valid.jsonl"] {
        std::fs::copy(assets.join("tide-log").join(name), dist.join("data").join(name))?;
    }
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
#[allow(clippy::unwrap_used)] // a failing test may panic
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, Failure> {
        Options::parse(&args.iter().map(|s| s.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn a_port_that_is_no_number_is_a_usage_error() {
        assert_eq!(parse(&["--port", "x"]).err().map(|f| f.status), Some(2));
        let options = Options { build_only: true, port: 0, origins: Vec::new() };
        assert_eq!(parse(&["--port", "0", "--build-only"]).ok(), Some(options));
    }

    #[test]
    fn what_is_no_origin_never_enters_the_policy() {
        for bad in ["", "https://", "example.org", "https://a.org/path", "https://a.org; script-src *", "data:", "*"] {
            assert_eq!(parse(&["--allow-origin", bad]).err().map(|f| f.status), Some(2), "{bad:?}");
        }
        let good = ["https://a.org", "http://localhost:9000"];
        let options = parse(&["--allow-origin", good[0], "--allow-origin", good[1]]).unwrap();
        assert!(policy(&options.origins).ends_with("connect-src 'self' https://a.org http://localhost:9000"));
    }

    #[test]
    fn the_page_carries_the_policy_that_the_server_sends() {
        let page = std::fs::read_to_string(root().join("web/page/site/index.html")).unwrap();
        assert!(page.contains(&format!("content=\"{}\"", policy(&[]))), "index.html and web::policy differ");
    }
}
