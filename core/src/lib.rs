//! placeholder
pub mod error;
pub mod rt;
pub mod weights;
