//! What every command needs of the engine: a device, a token that Ctrl-C sets, and a place to wait.

use std::future::Future;

use ebbtide::{Budget, Cancel, Device, DeviceChoice, Result};

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

/// A token that Ctrl-C sets. A second Ctrl-C ends the process at once.
pub fn cancel_on_ctrl_c() -> Cancel {
    let cancel = Cancel::new();
    let token = cancel.clone();
    // Fails only when a handler is there already; then that one does the work.
    let _ = ctrlc::set_handler(move || {
        if token.is_cancelled() {
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
