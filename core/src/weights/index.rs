//! `model.safetensors.index.json`: which shard of a folder holds which tensor.
//!
//! The file comes from a download and its shard names become paths, so each is checked as text before it is joined to
//! the folder: a name can only lead below the folder. Symbolic links *in* the folder are the user's own (the hub's
//! cache is made of them) and are followed.

use crate::error::Result;
use crate::weights::safetensors::{Header, MAX_HEADER_BYTES};
use crate::weights::source::Source;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::safetensors::format_error;

/// The index's file name within a model's folder.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// An index whose shard names are plain relative paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    file: String,
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads and checks an index; at most 100 MB.
    ///
    /// Errors: [`Error::Format`](crate::error::Error::Format) for what is not an index, a tensor named twice, or a shard
    /// name that could lead out of the folder; what [`Source::fill`] returns.
    pub async fn read(source: &Source) -> Result<Index> {
        if source.len() > MAX_HEADER_BYTES {
            let reason = format!("it has {} bytes, above the limit of {MAX_HEADER_BYTES} for an index", source.len());
            return Err(format_error(source.name(), None, reason));
        }
        let length = usize::try_from(source.len()).unwrap_or(usize::MAX);
        let mut text = vec![0; length];
        source.fill(0, &mut text).await?;
        Index::parse(source.name(), &text)
    }

    /// Checks the text of an index. `file` names it in errors.
    pub fn parse(file: &str, text: &[u8]) -> Result<Index> {
        #[derive(serde::Deserialize)]
        struct Raw {
            weight_map: UniqueMap,
        }
        let raw: Raw =
            serde_json::from_slice(text).map_err(|e| format_error(file, None, format!("not a valid index: {e}")))?;
        for (tensor, shard) in &raw.weight_map.0 {
            if let Err(why) = check_shard_name(shard) {
                return Err(format_error(file, Some(tensor), format!("the shard name {shard:?} is refused: {why}")));
            }
        }
        Ok(Index { file: file.into(), weight_map: raw.weight_map.0 })
    }

    /// The shards' names, sorted, each once.
    pub fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    /// Tensor and shard, sorted by tensor.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.iter().map(|(tensor, shard)| (tensor.as_str(), shard.as_str()))
    }

    /// The shard of a tensor.
    pub fn shard(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }

    /// Checks that every tensor is where the index says, given each shard's header by its name in the index.
    pub(crate) fn check(&self, headers: &BTreeMap<&str, &Header>) -> Result<()> {
        let mut homes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (shard, header) in headers {
            for tensor in &header.tensors {
                homes.entry(&tensor.name).or_default().push(shard);
            }
        }
        for (tensor, shard) in self.entries() {
            let reason = match homes.get(tensor) {
                Some(found) if found.contains(&shard) => continue,
                Some(found) => format!("the index says shard `{shard}`, but it is in `{}`", found.join("` and `")),
                None => format!("the index says shard `{shard}`, but no shard has it"),
            };
            return Err(format_error(&self.file, Some(tensor), reason));
        }
        Ok(())
    }
}

/// Whether a shard's name is a relative path of plain components, on every system: what one reads as part of a name
/// another reads as a separator, a drive or a stream.
pub fn check_shard_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("it is empty");
    }
    if name.contains('\0') {
        return Err("it contains a NUL");
    }
    if name.contains('\\') {
        return Err("it contains a backslash");
    }
    if name.contains(':') {
        return Err("it contains a colon");
    }
    if name.starts_with('/') {
        return Err("it is an absolute path");
    }
    for component in name.split('/') {
        match component {
            "" => return Err("it has an empty component"),
            "." | ".." => return Err("it has the component `.` or `..`"),
            _ => {}
        }
    }
    Ok(())
}

/// A map that refuses a key given twice.
struct UniqueMap(BTreeMap<String, String>);

impl<'de> serde::Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Unique;
        impl<'de> Visitor<'de> for Unique {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of shard names by tensor name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut all = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if all.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("duplicate tensor name `{key}`")));
                    }
                    all.insert(key, value);
                }
                Ok(UniqueMap(all))
            }
        }
        deserializer.deserialize_map(Unique)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn a_shard_name_is_a_relative_path_of_plain_components() {
        for good in
            ["a.safetensors", "model-00001-of-00002.safetensors", "sub/a.safetensors", "..a", "a..b/c", "...", "\u{e9}"]
        {
            assert_eq!(check_shard_name(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/..",
            "./a",
            "a/./b",
            "/a",
            "//a",
            "a//b",
            "a/",
            "C:a",
            "C:/a",
            "C:\\a",
            "\\\\server\\a",
            "..\\a",
            "a\\b",
            "a:stream",
            "file:///a",
            "a\0.safetensors",
            "\0",
        ] {
            assert!(check_shard_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_refused_shard_names_index_tensor_and_shard() {
        let error = Index::parse("i.json", br#"{"weight_map":{"t":"../../etc/passwd"}}"#).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.code(), "format");
        assert!(text.contains("i.json") && text.contains("`t`") && text.contains("../../etc/passwd"), "{text}");
    }

    #[test]
    fn what_is_no_index_is_a_format_error() {
        for bad in [
            "",
            "[]",
            "{}",
            "null",
            r#"{"weight_map":[]}"#,
            r#"{"weight_map":{"a":1}}"#,
            r#"{"weight_map":{"a":"b"}"#,
            r#"{"weight_map":{"a":"b","a":"c"}}"#,
            r#"{"weight_map":{"a":"b"},"weight_map":{"a":"b"}}"#,
            "\u{feff}{}",
        ] {
            let error = Index::parse("i.json", bad.as_bytes()).unwrap_err();
            assert_eq!(error.code(), "format", "{bad}");
        }
        assert!(Index::parse("i.json", &[b'{', 0xff, b'}']).is_err());
        let deep = format!(r#"{{"metadata":{}"#, "[".repeat(1_000_000));
        assert!(Index::parse("i.json", deep.as_bytes()).is_err());
    }

    #[test]
    fn shards_are_listed_once_and_metadata_is_of_no_concern() {
        let text = br#"{"metadata":{"total_size":7.5},"weight_map":{"b":"2","a":"1","c":"1"},"more":null}"#;
        let index = Index::parse("i.json", text).unwrap();
        assert_eq!(index.shards().into_iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(index.entries().collect::<Vec<_>>(), [("a", "1"), ("b", "2"), ("c", "1")]);
        assert_eq!((index.shard("b"), index.shard("d")), (Some("2"), None));
    }
}
