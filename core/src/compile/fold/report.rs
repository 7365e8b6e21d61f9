//! What compiling did to the constants, in figures and reasons.

use std::fmt;

use serde::Serialize;

use crate::error::Bytes;

/// A moment of compiling and the constant bytes on the device then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// The stage.
    pub name: String,
    /// Device bytes of weights and folds.
    pub bytes: u64,
}

/// What was folded, what was not, and what it comes to. All sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompileReport {
    /// What was folded.
    pub folded: Vec<String>,
    /// Constants that are computed in every step, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Sources of folds that are kept, with the reason.
    pub retained: Vec<(String, String)>,
    /// Weights not kept because folds consumed them.
    pub freed_bytes: u64,
    /// Folds whose weights are kept as well.
    pub duplicated_bytes: u64,
    /// Constants on the device after compiling.
    pub held_bytes: u64,
    /// Most constants on the device while compiling.
    pub peak_bytes: u64,
    /// What the largest single fold needs beyond what is held: its sources.
    pub largest_fold_bytes: u64,
    /// Upload and readback rings.
    pub staging_bytes: u64,
    /// The passes, and the planned bytes after each.
    pub stages: Vec<Stage>,
}

impl fmt::Display for CompileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<28} {:>20}", "stage", "constants on device")?;
        for stage in &self.stages {
            writeln!(f, "{:<28} {:>20}", stage.name, stage.bytes)?;
        }
        writeln!(
            f,
            "folded {}, freed {}, held {}, peak {}",
            self.folded.len(),
            Bytes(self.freed_bytes),
            Bytes(self.held_bytes),
            Bytes(self.peak_bytes)
        )?;
        if self.duplicated_bytes > 0 {
            writeln!(f, "duplicated {}", Bytes(self.duplicated_bytes))?;
        }
        for (name, reason) in &self.skipped {
            writeln!(f, "not folded: {name}: {reason}")?;
        }
        for (name, reason) in &self.retained {
            writeln!(f, "kept: {name}: {reason}")?;
        }
        Ok(())
    }
}
