//! What the user may say about memory, and what it comes to in bytes.

use std::fmt;
use std::str::FromStr;

use crate::error::{Bytes, Error, Result};

/// A budget as the user states it. It covers every byte on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// So many bytes.
    Bytes(u64),
    /// The floor without weights, and so much of the weight bytes touched; never less than the floor.
    Percent(f64),
    /// The least that can be kept.
    Floor,
    /// Everything resident.
    All,
    /// `all`, or less where memory is short: at most this many bytes, as a witness of free memory or a default says.
    Auto {
        /// The bytes that may be used.
        limit: u64,
    },
}

impl Budget {
    /// What `auto` may use where nothing tells how much memory is free: 2 GiB.
    pub const AUTO_DEFAULT: u64 = 2 << 30;

    /// A budget in bytes.
    pub fn bytes(bytes: u64) -> Budget {
        Budget::Bytes(bytes)
    }

    /// The bytes that may be used, given the floor, its part without weights, the weight bytes touched and the
    /// bytes with everything resident.
    pub(crate) fn resolve(self, floor: u64, without_weights: u64, weights: u64, all: u64) -> u64 {
        match self {
            Budget::Bytes(bytes) => bytes,
            Budget::Percent(p) => (without_weights + (weights as f64 * p / 100.0) as u64).max(floor),
            Budget::Floor => floor,
            Budget::All => all,
            Budget::Auto { limit } => all.min(limit),
        }
    }
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Budget> {
        let invalid = |reason: &str| Error::Invalid {
            what: format!("budget `{text}`"),
            reason: format!(
                "{reason}; accepted are bytes (74000), sizes (6GiB, 512MiB, 1.5GB), a share of the weights (50%), `floor`, `all`, `auto`"
            ),
        };
        let t = text.trim();
        match t.to_ascii_lowercase().as_str() {
            "floor" => return Ok(Budget::Floor),
            "all" => return Ok(Budget::All),
            "auto" => return Ok(Budget::Auto { limit: Budget::AUTO_DEFAULT }),
            _ => {}
        }
        let end = t.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(t.len());
        let (digits, unit) = (t[..end].replace('_', ""), t[end..].trim().to_ascii_lowercase());
        let number: f64 = digits.parse().map_err(|_| invalid("not a number"))?;
        let factor: f64 = match unit.as_str() {
            "" | "b" if digits.contains('.') => return Err(invalid("bytes are whole numbers")),
            "" | "b" => return digits.parse().map(Budget::Bytes).map_err(|_| invalid("out of range")),
            "%" => {
                return if number <= 100.0 { Ok(Budget::Percent(number)) } else { Err(invalid("above 100 %")) };
            }
            "kib" | "k" => 1024.0,
            "mib" | "m" => 1048576.0,
            "gib" | "g" => 1073741824.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            _ => return Err(invalid("unknown unit")),
        };
        let bytes = number * factor;
        if bytes >= 9e18 {
            return Err(invalid("out of range"));
        }
        Ok(Budget::Bytes(bytes as u64))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Bytes(b) => Bytes(*b).fmt(f),
            Budget::Percent(p) => write!(f, "{p}%"),
            Budget::Floor => f.write_str("floor"),
            Budget::All => f.write_str("all"),
            Budget::Auto { limit } => write!(f, "auto (at most {})", Bytes(*limit)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read_in_every_documented_form() {
        for (text, want) in [
            ("74000", Budget::Bytes(74_000)),
            ("6GiB", Budget::Bytes(6 << 30)),
            ("1.5 GB", Budget::Bytes(1_500_000_000)),
            ("50%", Budget::Percent(50.0)),
            ("floor", Budget::Floor),
            ("ALL", Budget::All),
        ] {
            assert_eq!(text.parse::<Budget>().unwrap(), want, "{text}");
        }
        for text in ["", "-1", "1.5", "12 parsecs", "101%", "1e30GiB", "99999999999GiB", "NaN%"] {
            let error = text.parse::<Budget>().unwrap_err();
            assert_eq!((error.code(), error.exit_status()), ("invalid", 2), "{text}");
        }
    }

    #[test]
    fn a_share_of_the_weights_never_falls_below_the_floor() {
        assert_eq!(Budget::Percent(0.0).resolve(100, 60, 400, 460), 100);
        assert_eq!(Budget::Percent(50.0).resolve(100, 60, 400, 460), 260);
    }
}
