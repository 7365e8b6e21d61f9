//! The page's own checks: its types, and the real page in headless Chromium, driven by Playwright.
//!
//! Tests inside the wasm module cannot see what breaks around it: a content security policy that forbids the module, a
//! script that does not fit its wasm, a wrong type from the server, a button that does nothing.

use crate::serve::{self, Site};
use crate::setup;
use crate::shell::{Failure, root, step, target_dir};
use std::path::{Path, PathBuf};

/// Checks the types of the page's scripts against the protocol's declarations, then serves the built page and runs the
/// tests of `web/page/tests`. Screenshots are left in `target/page`.
pub fn check(site: Site, packages: &Path) -> Result<(), Failure> {
    let page = root().join("web/page");
    step("node")
        .args([packages.join("typescript/bin/tsc").as_os_str(), "--project".as_ref(), page.as_os_str()])
        .run()?;
    let browser = setup::chromium().ok_or_else(|| {
        Failure::new("the page is tested in Chromium or Chrome, and none of that name is on the PATH")
    })?;
    let shots = target_dir().join("page");
    let port = serve::spawn(site)?;
    // One file after the other: two cores are not enough for two browsers with a GPU in software.
    step("node")
        .args(["--test", "--test-concurrency=1"])
        .args(tests(&page.join("tests"))?)
        .env("EBBTIDE_PAGE", format!("http://localhost:{port}/"))
        .env("EBBTIDE_CHROMIUM", browser)
        .env("EBBTIDE_SHOTS", shots)
        .run()
}

/// The files of tests. Versions of Node differ in what they make of a folder.
fn tests(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(|e| Failure::new(format!("{}: {e}", folder.display())))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".test.js"));
    files.sort();
    match files.is_empty() {
        true => Err(Failure::new(format!("{} holds no test", folder.display()))),
        false => Ok(files),
    }
}
