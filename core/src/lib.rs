//! placeholder
pub mod error;
pub mod weights;
