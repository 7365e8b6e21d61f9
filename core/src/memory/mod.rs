//! Device memory: what is counted, and the rings through which bytes come and go.

mod ledger;
mod ring;

pub(crate) use ledger::Claim;
pub use ledger::{Ledger, Usage};
pub(crate) use ring::Chunks;
