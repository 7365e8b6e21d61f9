//! How fast this machine is, remembered from the last training and from `doctor --measure`, so that `plan` can tell time.
//!
//! A forecast in seconds that nobody measured is a guess, and says so. The file lies in the user's cache folder, holds a
//! few numbers, and whatever is wrong with it means that nothing is known.

use std::path::PathBuf;

use ebbtide::llm::hub::HubEnvironment;
use ebbtide::rt::file::{io_error, make_folder, save_atomically};
use serde::{Deserialize, Serialize};

/// Multiply-adds a second where nothing was measured: a software adapter on a few cores does a tenth, a GPU a hundred times.
const GUESSED_WORK: f64 = 1e11;
/// Bytes a second from disk to device where nothing was measured.
const GUESSED_COPY: f64 = 2e9;

/// What is known. Rates are a second's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Speeds {
    format: u32,
    /// The adapter of the last training.
    adapter: String,
    /// Multiply-adds of the last training.
    work: Option<f64>,
    /// Bytes from disk, by `doctor --measure`.
    read: Option<f64>,
    /// Bytes from host to device, by `doctor --measure`.
    upload: Option<f64>,
}

/// A time and what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds of an optimizer step.
    pub seconds_per_step: f64,
    /// Whether nothing was measured on this machine.
    pub seconds_estimated: bool,
    /// In words.
    pub seconds_from: String,
}

impl Speeds {
    /// What is known here; nothing if there is no file or it is not understood.
    pub fn load() -> Speeds {
        let text = file().and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
        serde_json::from_slice::<Speeds>(&text).ok().filter(|s| s.format == 1 && s.sound()).unwrap_or_default()
    }

    fn sound(&self) -> bool {
        [self.work, self.read, self.upload].iter().flatten().all(|rate| rate.is_finite() && *rate > 0.0)
    }

    /// Takes note of a training's steps.
    pub fn learn(&mut self, adapter: &str, work: u64, bytes: u64, seconds: f64) {
        // What copying does not explain is computing; at least a tenth, as copies overlap.
        let computing = (seconds - bytes as f64 / self.copy()).max(seconds / 10.0);
        if work > 0 && computing > 0.0 {
            (self.adapter, self.work) = (adapter.into(), Some(work as f64 / computing));
        }
    }

    /// Takes note of a measurement.
    pub fn measured(&mut self, read: f64, upload: f64) {
        (self.read, self.upload) = (Some(read), Some(upload));
    }

    /// Writes the file. What cannot be written is not remembered; no command fails for it.
    pub fn remember(&self) {
        let Some(path) = file() else { return };
        let Ok(text) = serde_json::to_vec(&Speeds { format: 1, ..self.clone() }) else { return };
        if path.parent().is_some_and(|folder| make_folder(folder).is_ok()) {
            let _ = save_atomically(&path, |out| out.write_all(&text).map_err(|e| io_error(&path, e)));
        }
    }

    fn copy(&self) -> f64 {
        match (self.read, self.upload) {
            (Some(read), Some(upload)) => read.min(upload),
            _ => GUESSED_COPY,
        }
    }

    /// The time of a step with so many multiply-adds and bytes to read.
    pub fn estimate(&self, work: u64, bytes: u64) -> Estimate {
        let rate = self.work.unwrap_or(GUESSED_WORK);
        let seconds_from = match (self.work, self.read) {
            (Some(_), Some(_)) => format!("the last training, on {}, and doctor --measure", self.adapter),
            (Some(_), None) => format!("the last training, on {}", self.adapter),
            (None, Some(_)) => "doctor --measure for reading and a guess for computing".into(),
            (None, None) => "a guess: nothing was measured here yet (train, or doctor --measure)".into(),
        };
        Estimate {
            seconds_per_step: work as f64 / rate + bytes as f64 / self.copy(),
            seconds_estimated: self.work.is_none(),
            seconds_from,
        }
    }
}

fn file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(own) = set("EBBTIDE_CACHE") {
        return Some(own.join("speeds.json"));
    }
    let folder = set("XDG_CACHE_HOME").or_else(|| set("LOCALAPPDATA")).or_else(|| {
        let home = HubEnvironment::from_env().user?;
        Some(if cfg!(target_os = "macos") { home.join("Library/Caches") } else { home.join(".cache") })
    });
    Some(folder?.join("ebbtide").join("speeds.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_explains_its_own_time_and_nothing_known_is_a_guess() {
        let mut speeds = Speeds::default();
        assert!(speeds.estimate(1, 1).seconds_estimated);
        speeds.measured(1e9, 4e9);
        assert!(speeds.estimate(1, 1).seconds_estimated);
        speeds.learn("a GPU", 8_000_000_000, 500_000_000, 2.5);
        let estimate = speeds.estimate(8_000_000_000, 500_000_000);
        assert!((estimate.seconds_per_step - 2.5).abs() < 1e-9 && !estimate.seconds_estimated);
        // Half the bytes are half the reading and all of the computing.
        assert!((speeds.estimate(8_000_000_000, 250_000_000).seconds_per_step - 2.25).abs() < 1e-9);
    }
}
