//! The safetensors format: a header parser that trusts nothing, and a writer that streams.
//!
//! A file is eight bytes of header length (little-endian), a JSON object, and the tensors' bytes. Loaders that believed
//! the offsets read out of bounds, let two tensors share bytes silently, or ran on with zeros after a short download.
//! What [`Header::read`] returns holds: every range lies in the file, is as long as shape and type say, and the
//! ranges follow each other without hole or overlap from the end of the header to the end of the file.
//!
//! **Trailing bytes** after the last tensor are refused, as by the reference library (`safetensors` 0.8), whatever the
//! source is. Stricter than that library, on purpose: a tensor name or a metadata key given twice (it keeps the last), a
//! header that does not begin with `{` (it skips blanks), an entry that is a JSON array in place of an object, a rank
//! above [`MAX_RANK`], a tensor count's worth of shape that overflows 64 bits on any machine.

mod parse;
mod write;

pub(crate) use parse::format_error;
pub use parse::{Header, MAX_HEADER_BYTES, MAX_RANK, TensorInfo};
pub use write::{TensorSpec, Writer, write};
