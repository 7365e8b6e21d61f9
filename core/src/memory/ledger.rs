//! Every device byte, counted where buffers are made and destroyed.
//!
//! WebGPU has no query for memory in use, and drivers over-commit, so this is the only truth that exists on every
//! platform. It is checked before each allocation: a session cannot exceed its budget by mistake.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::compile::{Breakdown, Category};
use crate::error::{Bytes, Error, Result};

/// Counts the device memory of one device.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    live: Breakdown,
    peak: u64,
    at_peak: Breakdown,
    budget: Option<u64>,
    claims: u32,
    buffers: u64,
    made: u64,
}

/// The bytes that a session may use.
#[derive(Debug)]
pub(crate) struct Claim {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut s = self.ledger.state();
        s.claims -= 1;
        s.budget = if s.claims == 0 { None } else { s.budget.map(|b| b - self.bytes) };
    }
}

/// A reading of the ledger, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In use now.
    pub active: Breakdown,
    /// Most in use since the last reset.
    pub peak: u64,
    /// By category, at the moment of the peak.
    pub at_peak: Breakdown,
    /// Buffers that exist now.
    pub buffers: u64,
    /// Buffers ever made.
    pub made: u64,
}

impl Ledger {
    fn state(&self) -> MutexGuard<'_, State> {
        // The state is plain numbers, valid at every point: a panic elsewhere cannot have broken it.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What is in use.
    pub fn usage(&self) -> Usage {
        let s = self.state();
        Usage { active: s.live, peak: s.peak, at_peak: s.at_peak, buffers: s.buffers, made: s.made }
    }

    /// Bytes in use now.
    pub fn active(&self) -> u64 {
        self.state().live.total()
    }

    /// Most bytes in use since the last reset.
    pub fn peak(&self) -> u64 {
        self.state().peak
    }

    /// Begins a new peak from what is in use now.
    pub fn reset_peak(&self) {
        let mut s = self.state();
        (s.peak, s.at_peak) = (s.live.total(), s.live);
    }

    /// Claims bytes for a session: what all sessions of a device claim, beyond what was there before the first of them,
    /// is what may be used. The claim ends with the handle.
    pub(crate) fn claim(self: &Arc<Ledger>, bytes: u64) -> Claim {
        let mut s = self.state();
        let now = s.live.total();
        s.budget = Some(s.budget.unwrap_or(now) + bytes);
        s.claims += 1;
        Claim { ledger: self.clone(), bytes }
    }

    /// Counts a buffer about to be made; refuses what would exceed the budget.
    pub(crate) fn take(&self, what: &str, category: Category, bytes: u64) -> Result<()> {
        let mut s = self.state();
        let now = s.live.total();
        if s.budget.is_some_and(|budget| now + bytes > budget) {
            return Err(Error::OutOfMemory {
                what: format!("{what} within the budget"),
                size: Bytes(bytes),
                in_use: Bytes(now),
            });
        }
        s.live.add(category, bytes);
        (s.buffers, s.made) = (s.buffers + 1, s.made + 1);
        if now + bytes > s.peak {
            (s.peak, s.at_peak) = (now + bytes, s.live);
        }
        Ok(())
    }

    /// Counts a buffer that is gone.
    pub(crate) fn give_back(&self, category: Category, bytes: u64) {
        let mut s = self.state();
        s.live.sub(category, bytes);
        s.buffers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_above_the_budget_is_refused_and_not_counted() {
        let ledger = Arc::new(Ledger::default());
        let _claim = ledger.claim(100);
        ledger.take("a", Category::Weights, 60).unwrap();
        assert_eq!(ledger.take("b", Category::Upload, 41).unwrap_err().code(), "out-of-memory");
        ledger.take("b", Category::Upload, 40).unwrap();
        ledger.give_back(Category::Weights, 60);
        let usage = ledger.usage();
        assert_eq!((usage.active.total(), usage.peak, usage.buffers), (40, 100, 1));
        assert_eq!(usage.at_peak.get(Category::Weights), 60);
    }

    #[test]
    fn sessions_of_one_device_may_use_what_they_claim_together() {
        let ledger = Arc::new(Ledger::default());
        let first = ledger.claim(100);
        drop(ledger.claim(10));
        ledger.take("a", Category::Weights, 100).unwrap();
        assert!(ledger.take("b", Category::Weights, 1).is_err());
        let second = ledger.claim(10);
        ledger.take("b", Category::Weights, 10).unwrap();
        drop((first, second));
    }
}
