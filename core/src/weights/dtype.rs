//! Element types: the few that a weight may have, and all that a safetensors file may declare.
//!
//! The two are kept apart so that a file with an exotic tensor can still be listed, while no code that computes with
//! weights ever meets a type it has no decoding for.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a weight, kept on the device as it is stored in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an [`DType::F32`].
    BF16,
    /// Signed, 64 bits.
    I64,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 8 bits.
    U8,
}

impl DType {
    /// Every type, in the order of declaration.
    pub const ALL: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8];

    /// Bytes an element.
    pub const fn size(self) -> u64 {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// The type's name in safetensors headers.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::U8 => "U8",
        }
    }

    /// The type of this name in safetensors headers; `None` for one that cannot be a weight.
    pub fn from_safetensors(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The names of all types, for messages.
    pub(crate) fn list() -> String {
        DType::ALL.map(DType::name).join(", ")
    }

    /// Whether the type is a floating-point one.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Names and bits an element of every type of the safetensors format 0.8, from the narrowest to the widest in that
/// library's own order, which is the order its writer sorts by.
const STORED: [(&str, u64); 22] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// The element type that a file declares for a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileDType {
    /// One that a weight may have.
    Weight(DType),
    /// Another type of the format: such a tensor can be listed, but not used.
    Other(&'static str),
}

impl FileDType {
    /// The type of this name; `None` if the format knows no such type.
    pub fn from_safetensors(name: &str) -> Option<FileDType> {
        match DType::from_safetensors(name) {
            Some(dtype) => Some(FileDType::Weight(dtype)),
            None => STORED.iter().find(|(n, _)| *n == name).map(|(n, _)| FileDType::Other(n)),
        }
    }

    /// The type's name in safetensors headers.
    pub fn name(self) -> &'static str {
        match self {
            FileDType::Weight(dtype) => dtype.name(),
            FileDType::Other(name) => name,
        }
    }

    /// Bits an element. Below 8 for the packed types.
    pub fn bits(self) -> u64 {
        STORED.get(self.rank()).map_or(8, |(_, bits)| *bits)
    }

    /// The type, if a weight may have it.
    pub fn weight(self) -> Option<DType> {
        match self {
            FileDType::Weight(dtype) => Some(dtype),
            FileDType::Other(_) => None,
        }
    }

    /// The place in the order by which the reference writer sorts tensors (widest first).
    pub(crate) fn rank(self) -> usize {
        STORED.iter().position(|(n, _)| *n == self.name()).unwrap_or(0)
    }
}

impl From<DType> for FileDType {
    fn from(dtype: DType) -> Self {
        FileDType::Weight(dtype)
    }
}

impl fmt::Display for FileDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_weight_type_is_found_by_its_name_with_its_own_size() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_safetensors(dtype.name()), Some(dtype));
            assert_eq!(FileDType::from(dtype).bits(), dtype.size() * 8, "{dtype}");
        }
        assert_eq!(DType::from_safetensors("f32"), None);
    }

    #[test]
    fn a_type_that_cannot_be_a_weight_is_known_to_the_file_level_only() {
        assert_eq!(DType::from_safetensors("F8_E4M3"), None);
        assert_eq!(FileDType::from_safetensors("F8_E4M3"), Some(FileDType::Other("F8_E4M3")));
        assert_eq!(FileDType::from_safetensors("F4").map(FileDType::bits), Some(4));
        assert_eq!(FileDType::from_safetensors("Q4_K"), None);
    }
}
