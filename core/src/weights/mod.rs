//! What weights exist and where their bytes are: files, headers, names, segments and pieces.
//!
//! No weight bytes are held here, and nothing that a file says is believed before it is checked: a file that is cut
//! short, overlapping, holed or lying is refused when it is opened, with its name, the tensor's and the offsets.

pub mod catalog;
pub mod dtype;
pub(crate) mod fingerprint;
pub mod index;
pub mod piece;
pub mod safetensors;
pub mod segment;
pub mod source;

pub use catalog::{Catalog, Weight, WeightId};
pub use dtype::{DType, FileDType};
pub use piece::{PIECE_BYTES, Piece};
pub use safetensors::{Header, TensorInfo};
pub use segment::{Segment, SegmentEntry, SegmentId};
pub use source::{Fetch, Identity, ReadAt, Source};
