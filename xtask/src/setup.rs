//! Installing what a fresh machine lacks: a Vulkan adapter, the wasm32 target, wasm-bindgen, Node, Chromium.
//!
//! Each function makes sure of one thing and does nothing where it is there already, so a second run costs nothing.
//! System packages are installed only as root on Debian and its kin; elsewhere the error is the command to run.

use crate::shell::{Failure, cargo, find_program, root, say, step, target_dir};
use std::path::{Path, PathBuf};

const WASM: &str = "wasm32-unknown-unknown";

/// Everything, for images and caches.
pub fn everything() -> Result<(), Failure> {
    adapter()?;
    wasm_toolchain()?;
    wasm_bindgen()?;
    node_packages()?;
    browser()?;
    say("everything is in place");
    Ok(())
}

/// A GPU adapter, in software where there is no other. macOS and Windows bring Metal and DX12 (WARP) along.
pub fn adapter() -> Result<(), Failure> {
    if !cfg!(target_os = "linux") || std::env::var_os("VK_DRIVER_FILES").is_some() {
        return Ok(());
    }
    let drivers = vulkan_drivers();
    let loader = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].iter().any(|dir| has_file(dir, 1, "libvulkan.so.1"));
    if loader && may_have_adapter(&drivers, has_gpu_node()) {
        return Ok(());
    }
    say("no Vulkan adapter here: lavapipe, Mesa's Vulkan driver for the CPU, will do");
    install_packages(&["libvulkan1", "mesa-vulkan-drivers"], "a Vulkan driver (for the GPU, or lavapipe for the CPU)")
}

/// Drivers of GPUs that the machine does not have are installed along with lavapipe, and the other way round: a driver
/// counts if it is lavapipe or if there is a GPU at all.
fn may_have_adapter(drivers: &[String], gpu_node: bool) -> bool {
    drivers.iter().any(|name| name.starts_with("lvp_icd")) || (gpu_node && !drivers.is_empty())
}

fn vulkan_drivers() -> Vec<String> {
    let dirs = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    let files = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    files.map(|f| f.file_name().to_string_lossy().into_owned()).filter(|name| name.ends_with(".json")).collect()
}

fn has_gpu_node() -> bool {
    let render = std::fs::read_dir("/dev/dri")
        .is_ok_and(|dir| dir.flatten().any(|node| node.file_name().to_string_lossy().starts_with("renderD")));
    render || Path::new("/dev/nvidiactl").exists() || Path::new("/dev/dxg").exists()
}

/// SwiftShader's Vulkan driver, which Chromium and Chrome carry: a second, stricter adapter.
pub fn swiftshader_driver() -> Option<PathBuf> {
    let dirs = ["/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome", "/opt/chromium"];
    dirs.iter().map(|dir| Path::new(dir).join("vk_swiftshader_icd.json")).find(|path| path.is_file())
}

/// How to compile for the web.
pub enum WasmToolchain {
    /// The pinned toolchain with its wasm32 target.
    Rustup,
    /// Debian's rustc and cargo, building the standard library from source; the folder that holds them.
    Debian(PathBuf),
}

impl WasmToolchain {
    /// A cargo command for the web target.
    pub fn cargo(&self, command: &str) -> crate::shell::Step {
        match self {
            WasmToolchain::Rustup => cargo([command, "--target", WASM]),
            // A target directory of its own: two compilers must not share one.
            WasmToolchain::Debian(bin) => step(bin.join("cargo"))
                .args([command, "-Z", "build-std=std,panic_abort", "--target", WASM])
                .env("RUSTC_BOOTSTRAP", "1")
                .env("RUSTC", bin.join("rustc"))
                .env("RUSTDOC", bin.join("rustdoc"))
                .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", "wasm-ld-19")
                .env("CARGO_TARGET_DIR", self.target_dir())
                .without_env("RUSTUP_TOOLCHAIN")
                .without_env("CARGO"),
        }
    }

    /// Where its output lies.
    pub fn target_dir(&self) -> PathBuf {
        match self {
            WasmToolchain::Rustup => target_dir(),
            WasmToolchain::Debian(_) => target_dir().join("debian-wasm"),
        }
    }
}

/// The wasm32 target of the pinned toolchain; Debian's `rustc-web` where that cannot be had.
pub fn wasm_toolchain() -> Result<WasmToolchain, Failure> {
    let sysroot = step("rustc").args(["--print", "sysroot"]).output().unwrap_or_default();
    if !sysroot.is_empty() && Path::new(sysroot.trim()).join("lib/rustlib").join(WASM).join("lib").is_dir() {
        return Ok(WasmToolchain::Rustup);
    }
    say("the wasm32 target is missing: adding it");
    let failure = match step("rustup").args(["target", "add", WASM]).run() {
        Ok(()) => return Ok(WasmToolchain::Rustup),
        Err(failure) => failure,
    };
    say(&format!("{}; falling back to Debian's rustc-web, which builds the standard library itself", failure.message));
    let packages = ["rustc-web", "cargo-web", "rust-web-src", "lld-19"];
    let bin = || {
        let files = step("dpkg").args(["-L", "cargo-web"]).output()?;
        let cargo = files.lines().find(|line| line.ends_with("bin/cargo"))?;
        Path::new(cargo).parent().map(Path::to_path_buf)
    };
    if bin().is_none() || find_program("wasm-ld-19").is_none() {
        install_packages(&packages, &format!("the target {WASM} (`rustup target add {WASM}`)"))?;
    }
    bin().map(WasmToolchain::Debian).ok_or_else(|| Failure::new("the package cargo-web holds no bin/cargo"))
}

/// wasm-bindgen's programs at exactly the version of the library in `Cargo.lock`; returns the folder that holds them.
pub fn wasm_bindgen() -> Result<PathBuf, Failure> {
    let lock = std::fs::read_to_string(root().join("Cargo.lock"))
        .map_err(|e| Failure::new(format!("Cargo.lock could not be read: {e}")))?;
    let version =
        locked_version(&lock, "wasm-bindgen").ok_or_else(|| Failure::new("Cargo.lock does not name wasm-bindgen"))?;
    let tools = target_dir().join("tools");
    let bin = tools.join("bin");
    let cached = step(bin.join("wasm-bindgen")).args(["--version"]).output();
    if cached.is_some_and(|text| text.split_whitespace().any(|word| word == version)) {
        return Ok(bin);
    }
    say(&format!("wasm-bindgen {version} is missing: compiling it once into {} (minutes)", tools.display()));
    let build = tools.join("build");
    let install = |locked: &[&str]| {
        cargo(["install", "wasm-bindgen-cli", "--version", version])
            .args(["--bin", "wasm-bindgen", "--bin", "wasm-bindgen-test-runner"])
            .args(locked)
            .args(["--root".as_ref(), tools.as_os_str()])
            .quiet_env("CARGO_TARGET_DIR", &build)
            // A tool of ours, used for seconds: half the optimisation is half the wait.
            .quiet_env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .run()
    };
    // A registry mirror may lack a version that the tool's own lock file names.
    install(&["--locked"]).or_else(|failure| {
        say(&format!("{}; trying with the newest compatible versions of its dependencies", failure.message));
        install(&[])
    })?;
    // A cache of 200 MB that nothing will use again; failing to remove it harms nobody.
    std::fs::remove_dir_all(&build).ok();
    Ok(bin)
}

/// The version that a lock file gives a package.
fn locked_version<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let mut lines = lock.lines().skip_while(|line| *line != format!("name = \"{package}\"")).skip(1);
    lines.next()?.strip_prefix("version = \"")?.strip_suffix('"')
}

/// The page's packages from npm, at exactly the versions of its lock file: the chart library it is built with, and what
/// it is checked and tested with. Returns the folder that holds them.
pub fn node_packages() -> Result<PathBuf, Failure> {
    let page = root().join("web/page");
    let packages = page.join("node_modules");
    let changed = |path: &Path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
    // npm writes its own copy of the lock file when all is in place.
    let (lock, done) = (changed(&page.join("package-lock.json")), changed(&packages.join(".package-lock.json")));
    node()?;
    if lock.is_some() && done >= lock {
        return Ok(packages);
    }
    let npm = if cfg!(windows) { "npm.cmd" } else { "npm" };
    let shown = format!("cd {} && npm ci", page.display());
    step(npm).args(["ci", "--no-audit", "--no-fund", "--prefix"]).args([&page]).run().map_err(|failure| {
        Failure::new(format!("{}; the page needs the packages that its lock file names: {shown}", failure.message))
    })?;
    Ok(packages)
}

/// Node with npm, from version 18 on.
fn node() -> Result<(), Failure> {
    let version = || {
        find_program(if cfg!(windows) { "npm.cmd" } else { "npm" })?;
        major_version(&step("node").args(["--version"]).output()?)
    };
    let (oldest, what) = (18, "Node 18 or newer with npm, for the page's chart library,");
    if version().is_none() {
        say("Node or npm is missing");
        install_packages(&["nodejs", "npm"], what)?;
    }
    match version() {
        Some(found) if found >= oldest => Ok(()),
        Some(found) => Err(Failure::new(format!("{what} is needed; `node` here is version {found}"))),
        None => Err(Failure::new("nodejs and npm were installed, but `node --version` does not answer")),
    }
}

/// 20 of "v20.20.2".
fn major_version(text: &str) -> Option<u32> {
    text.trim().strip_prefix('v')?.split('.').next()?.parse().ok()
}

/// The browser that the page is tested in: the program itself, where it can be found by name.
pub fn chromium() -> Option<PathBuf> {
    BROWSERS.iter().find_map(|name| find_program(name))
}

const BROWSERS: [&str; 5] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"];

/// Headless Chromium with its driver; returns the driver.
pub fn browser() -> Result<PathBuf, Failure> {
    let found = || {
        let driver = std::env::var_os("CHROMEDRIVER").map(PathBuf::from).or_else(|| find_program("chromedriver"))?;
        // Outside Linux browsers are not on the PATH; their driver knows where they are.
        (!cfg!(target_os = "linux") || chromium().is_some()).then_some(driver)
    };
    if let Some(driver) = found() {
        return Ok(driver);
    }
    say("Chromium or its driver is missing");
    if os_release().contains("ID=ubuntu") {
        // Ubuntu's package is a stub for a snap, which neither containers nor the driver can use.
        return Err(Failure::new(
            "install Google Chrome and the chromedriver of the same version \
             (https://googlechromelabs.github.io/chrome-for-testing), or run `cargo xtask test --native-only`",
        ));
    }
    install_packages(&["chromium", "chromium-driver"], "Chromium or Chrome with its chromedriver")?;
    found().ok_or_else(|| Failure::new("chromium was installed, but no `chromedriver` is on the PATH"))
}

/// Installs Debian packages as root; anywhere else the error says what to run.
fn install_packages(packages: &[&str], what: &str) -> Result<(), Failure> {
    let line = format!("apt-get update && apt-get install -y --no-install-recommends {}", packages.join(" "));
    if find_program("apt-get").is_none() {
        let system = if cfg!(target_os = "macos") {
            "with Homebrew (`brew install --cask chromium chromedriver` for the browser)"
        } else {
            "with your system's package manager"
        };
        return Err(Failure::new(format!("{what} is needed: install it {system}; on Debian: {line}")));
    }
    if !is_root() {
        return Err(Failure::new(format!(
            "{what} is needed and only root can install it. Run:\n    sudo sh -c '{line}'"
        )));
    }
    // An unreachable mirror is no reason to stop while the package lists may still do.
    if let Err(failure) = step("apt-get").args(["update", "-q"]).run() {
        say(&format!("{}; going on with the package lists there are", failure.message));
    }
    step("apt-get")
        .args(["install", "-y", "-q", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()
}

fn is_root() -> bool {
    step("id").args(["-u"]).output().is_some_and(|id| id.trim() == "0")
}

fn os_release() -> String {
    std::fs::read_to_string("/etc/os-release").unwrap_or_default()
}

/// Whether a file lies in a folder or up to `depth` levels below it.
fn has_file(dir: impl AsRef<Path>, depth: usize, name: &str) -> bool {
    let dir = dir.as_ref();
    if dir.join(name).exists() {
        return true;
    }
    let Ok(entries) = std::fs::read_dir(dir) else {
        return false;
    };
    depth > 0 && entries.flatten().any(|entry| entry.path().is_dir() && has_file(entry.path(), depth - 1, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_version_is_taken_from_the_lock_file_and_not_from_a_package_of_a_longer_name() {
        let lock = "[[package]]\nname = \"wasm-bindgen-futures\"\nversion = \"0.4.80\"\n\n\
                    [[package]]\nname = \"wasm-bindgen\"\nversion = \"0.2.130\"\n";
        assert_eq!(locked_version(lock, "wasm-bindgen"), Some("0.2.130"));
        assert_eq!(locked_version(lock, "wasm"), None);
    }

    #[test]
    fn the_version_of_node_is_its_first_number() {
        assert_eq!(major_version("v20.20.2\n"), Some(20));
        assert_eq!(major_version("20"), None);
    }

    #[test]
    fn a_driver_for_a_gpu_that_is_not_there_is_no_adapter() {
        let radeon = vec!["radeon_icd.x86_64.json".to_owned()];
        assert!(!may_have_adapter(&radeon, false));
        assert!(may_have_adapter(&radeon, true));
        assert!(may_have_adapter(&["lvp_icd.x86_64.json".to_owned()], false));
        assert!(!may_have_adapter(&[], true));
    }
}
