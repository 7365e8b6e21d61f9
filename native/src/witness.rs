//! The outside witness: memory as the operating system sees it, next to the engine's own ledger.
//!
//! On a software adapter device memory is process memory, so the resident size of the process is what the ledger
//! must answer to. On other adapters the figure is still reported, and says what it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

/// What a witness saw.
#[derive(Clone, Debug, Serialize)]
pub struct Testimony {
    /// What was measured.
    pub what: &'static str,
    /// Before the engine made anything but the device.
    pub baseline_bytes: Option<u64>,
    /// The most that was seen.
    pub peak_bytes: Option<u64>,
}

/// Samples the resident memory of this process until it is asked.
pub struct Witness {
    baseline: Option<u64>,
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

const EVERY: Duration = Duration::from_millis(10);

impl Witness {
    /// Begins to watch.
    pub fn start() -> Witness {
        let baseline = resident_bytes();
        let peak = Arc::new(AtomicU64::new(baseline.unwrap_or(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let (p, s) = (peak.clone(), stop.clone());
        let thread = baseline.is_some().then(|| {
            std::thread::spawn(move || {
                while !s.load(Ordering::Acquire) {
                    p.fetch_max(resident_bytes().unwrap_or(0), Ordering::AcqRel);
                    std::thread::sleep(EVERY);
                }
            })
        });
        Witness { baseline, peak, stop, thread }
    }

    /// The most that was seen so far.
    pub fn peak(&self) -> Option<u64> {
        self.baseline.map(|_| self.peak.load(Ordering::Acquire))
    }

    /// Ends watching.
    pub fn finish(mut self) -> Testimony {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.peak.fetch_max(resident_bytes().unwrap_or(0), Ordering::AcqRel);
        Testimony {
            what: "resident memory of the process, sampled every 10 ms",
            baseline_bytes: self.baseline,
            peak_bytes: self.baseline.map(|_| self.peak.load(Ordering::Acquire)),
        }
    }
}

/// Resident memory of this process, where the system says it in a file.
pub fn resident_bytes() -> Option<u64> {
    of_status("VmRSS:")
}

/// The most resident memory that this process ever had, as GNU time reports it.
pub fn highest_bytes() -> Option<u64> {
    of_status("VmHWM:")
}

fn of_status(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
