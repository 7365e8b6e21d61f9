//! What every command needs of the engine: a device, a token that Ctrl-C sets, and a place to wait.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use ebbtide::error::Bytes;
use ebbtide::{Budget, Cancel, Device, DeviceChoice, Error, Result, Source};

/// Runs a future of the engine on this thread, which from then on owns the device.
pub fn wait<T>(future: impl Future<Output = T>) -> T {
    pollster::block_on(future)
}

/// Opens the adapter that the environment, or `--device`, names.
pub async fn open_device(name: Option<&str>) -> Result<Device> {
    let mut choice = DeviceChoice::from_env();
    if let Some(name) = name {
        choice.adapter = Some(name.to_string());
    }
    Device::open(&choice).await
}

/// A size for people, without the exact figure.
pub fn short(bytes: u64) -> String {
    Bytes(bytes).to_string().split(" (").next().unwrap_or_default().to_owned()
}

/// Temporary folders that exist, so that a second Ctrl-C leaves none behind.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary folder that goes with its handle, or with the process when Ctrl-C ends it.
pub fn temporary_folder() -> anyhow::Result<tempfile::TempDir> {
    temporary_folder_in(None)
}

/// The same in a folder of the caller's, where one is named.
pub fn temporary_folder_in(place: Option<&Path>) -> anyhow::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("ebbtide-");
    let folder = match place {
        Some(place) => builder.tempdir_in(place),
        None => builder.tempdir(),
    };
    let folder = folder.context("a temporary folder")?;
    TEMPORARY.lock().unwrap_or_else(|p| p.into_inner()).push(folder.path().to_path_buf());
    Ok(folder)
}

/// Refuses to write over a file that the command reads.
pub fn refuse_overwriting(flag: &str, out: &Path, inputs: &[&Path]) -> Result<()> {
    let Ok(target) = Source::open(out) else { return Ok(()) };
    for input in inputs {
        if Source::open(input)?.identity() == target.identity() {
            let reason = format!("{} is an input of this command; write somewhere else", input.display());
            return Err(Error::Invalid { what: format!("{flag} {}", out.display()), reason });
        }
    }
    Ok(())
}

/// A token that Ctrl-C sets. A second Ctrl-C ends the process at once.
pub fn cancel_on_ctrl_c() -> Cancel {
    let cancel = Cancel::new();
    let token = cancel.clone();
    // Fails only when a handler is there already; then that one does the work.
    let _ = ctrlc::set_handler(move || {
        if token.is_cancelled() {
            for folder in TEMPORARY.lock().unwrap_or_else(|p| p.into_inner()).iter() {
                let _ = std::fs::remove_dir_all(folder);
            }
            std::process::exit(130);
        }
        token.cancel();
    });
    cancel
}

/// A budget as given on the command line. For `auto`, also where its limit comes from.
pub fn budget(text: &str, device: Option<&str>) -> Result<(Budget, Option<String>)> {
    match text.parse()? {
        Budget::Auto { .. } => {
            let (limit, why) = crate::doctor::auto_bytes(device);
            Ok((Budget::Auto { limit }, Some(why)))
        }
        budget => Ok((budget, None)),
    }
}
