//! One error type for the whole engine.
//!
//! Every failure a caller can meet is a variant with fields, so that nobody has to read a message to
//! decide what to do: [`Error::code`] is stable across releases and the same in Rust, in `--json` output
//! and in the page. A message says what was asked, what there is, and what to do.

use std::fmt;

/// A number of bytes, printed in human units with the exact figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        match UNITS.iter().find(|(_, size)| self.0 >= *size) {
            Some((unit, size)) => write!(f, "{:.2} {unit} ({} bytes)", self.0 as f64 / *size as f64, self.0),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Everything that can go wrong in the engine.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened or read.
    #[error("{file}: {reason}")]
    Io {
        /// The file's path or name.
        file: String,
        /// What the operating system said.
        reason: String,
    },
    /// A file is not what its format promises.
    #[error("{file}: {reason}{}", tensor.as_ref().map(|t| format!(" (tensor `{t}`)")).unwrap_or_default())]
    Format {
        /// The file's path or name.
        file: String,
        /// The tensor concerned, where there is one.
        tensor: Option<String>,
        /// What is wrong, with offsets and sizes.
        reason: String,
    },
    /// A file changed (size or modification time) after it was opened.
    #[error(
        "{file}: the file changed while in use ({reason}); nothing was updated. Restore the file and open it again"
    )]
    SourceChanged {
        /// The file's path or name.
        file: String,
        /// What changed.
        reason: String,
    },
    /// A name that does not exist was asked for.
    #[error("no {what} named `{name}`{}", hint.as_ref().map(|h| format!("; {h}")).unwrap_or_default())]
    NotFound {
        /// What kind of thing was looked for.
        what: &'static str,
        /// The name.
        name: String,
        /// What there is instead.
        hint: Option<String>,
    },
    /// Shapes or dtypes do not fit an operation.
    #[error("{op}: {reason}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What was given and what was expected.
        reason: String,
    },
    /// An argument or flag is out of range.
    #[error("{what}: {reason}")]
    Invalid {
        /// The flag or argument.
        what: String,
        /// Why it is refused and what is accepted.
        reason: String,
    },
    /// The budget is below the floor.
    #[error("a budget of {asked} is below the floor of {floor}, which is set by {set_by}; ask for at least {} bytes, or `floor`", floor.0)]
    BudgetBelowFloor {
        /// The budget asked for.
        asked: Bytes,
        /// The least budget that can be kept.
        floor: Bytes,
        /// The segment or action that sets the floor.
        set_by: String,
    },
    /// The adapter's limits are below what the graph needs.
    #[error("{what} needs {need}, but the adapter allows {have}")]
    Limit {
        /// What was to be made.
        what: String,
        /// The need, in the limit's unit.
        need: u64,
        /// The adapter's limit.
        have: u64,
    },
    /// No adapter answers.
    #[error("no GPU adapter was found ({reason}); `ebbtide doctor` says what is missing and how to get it")]
    NoAdapter {
        /// What was looked for.
        reason: String,
    },
    /// The device is out of memory.
    #[error(
        "the device is out of memory: {what} of {size} could not be made while {in_use} were in use; choose a smaller budget"
    )]
    OutOfMemory {
        /// What was to be made.
        what: String,
        /// Its size.
        size: Bytes,
        /// Bytes in use by the engine then.
        in_use: Bytes,
    },
    /// The device was lost.
    #[error("the GPU device was lost ({reason}); open it again to go on, nothing of the failed step was kept")]
    DeviceLost {
        /// What the driver said.
        reason: String,
    },
    /// The driver refused something that the engine holds to be valid.
    #[error("the GPU driver refused {what}: {reason}")]
    Gpu {
        /// What was submitted.
        what: String,
        /// What the driver said.
        reason: String,
    },
    /// A plan failed its verification: a defect of the engine, found before it could do harm.
    #[error("internal error: the plan is not valid at action {action}: {reason}; please report this")]
    Plan {
        /// Index of the action.
        action: usize,
        /// The broken rule.
        reason: String,
    },
    /// The caller cancelled.
    #[error("cancelled; nothing of the cancelled step was kept")]
    Cancelled,
    /// A weight was released by the compiler and its source cannot be read again.
    #[error("weight `{weight}` was released when the program was compiled and has no source to be read from again")]
    SourceReleased {
        /// The first missing weight.
        weight: String,
    },
    /// A hook or data callback of the caller failed.
    #[error("the hook `{hook}` failed: {reason}")]
    Hook {
        /// The hook's name.
        hook: String,
        /// What it said.
        reason: String,
    },
}

/// The engine's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A stable name, the same in Rust, in JSON and in the page.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Io { .. } => "io",
            Error::Format { .. } => "format",
            Error::SourceChanged { .. } => "source-changed",
            Error::NotFound { .. } => "not-found",
            Error::Shape { .. } => "shape",
            Error::Invalid { .. } => "invalid",
            Error::BudgetBelowFloor { .. } => "budget-below-floor",
            Error::Limit { .. } => "limit",
            Error::NoAdapter { .. } => "no-adapter",
            Error::OutOfMemory { .. } => "out-of-memory",
            Error::DeviceLost { .. } => "device-lost",
            Error::Gpu { .. } => "gpu",
            Error::Plan { .. } => "plan",
            Error::Cancelled => "cancelled",
            Error::SourceReleased { .. } => "source-released",
            Error::Hook { .. } => "hook",
        }
    }

    /// The exit status of a command that ends with this error: 1 failed while running, 2 bad input or usage,
    /// 3 budget refused, 4 device lost or out of memory, 130 interrupted.
    pub fn exit_status(&self) -> u8 {
        match self {
            Error::Io { .. } | Error::Format { .. } | Error::NotFound { .. } | Error::Shape { .. } => 2,
            Error::Invalid { .. } | Error::Limit { .. } | Error::SourceReleased { .. } => 2,
            Error::BudgetBelowFloor { .. } => 3,
            Error::NoAdapter { .. } | Error::OutOfMemory { .. } | Error::DeviceLost { .. } => 4,
            Error::Cancelled => 130,
            Error::SourceChanged { .. } | Error::Gpu { .. } | Error::Plan { .. } | Error::Hook { .. } => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_printed_in_human_units_with_the_exact_figure() {
        assert_eq!(Bytes(74_000).to_string(), "72.27 KiB (74000 bytes)");
        assert_eq!(Bytes(12).to_string(), "12 bytes");
    }

    #[test]
    fn a_refused_budget_names_the_floor_and_what_sets_it() {
        let e = Error::BudgetBelowFloor { asked: Bytes(10), floor: Bytes(20), set_by: "segment `down`".into() };
        assert_eq!((e.code(), e.exit_status()), ("budget-below-floor", 3));
        assert!(e.to_string().contains("at least 20 bytes") && e.to_string().contains("segment `down`"));
    }
}
