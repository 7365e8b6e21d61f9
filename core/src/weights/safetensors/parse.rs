//! Reading a header: from bytes of anybody's to a list of tensors whose ranges can be relied on.

use crate::error::{Error, Result};
use crate::weights::dtype::FileDType;
use crate::weights::fingerprint::Fingerprint;
use crate::weights::source::Source;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The largest header that is read, in bytes; the reference library's limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The largest number of dimensions of a tensor.
pub const MAX_RANK: usize = 64;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in the header.
    pub name: Arc<str>,
    /// The element type.
    pub dtype: FileDType,
    /// The shape, outermost dimension first; empty for a scalar. A 0 in it makes an empty tensor.
    pub shape: Vec<u64>,
    /// The bytes, counted from the start of the file.
    pub range: Range<u64>,
}

/// A file's header, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes in the file.
    pub tensors: Vec<TensorInfo>,
    /// The `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// Bytes before the first tensor: the length field and the JSON text.
    pub header_bytes: u64,
    /// A hash of the JSON text, the same on every machine and in every release.
    pub fingerprint: u64,
}

impl Header {
    /// Reads and checks the header of `source`; no tensor bytes are read.
    ///
    /// Errors: [`Error::Format`] naming file and tensor for anything that is not as the format promises, and what
    /// [`Source::fill`] returns.
    pub async fn read(source: &Source) -> Result<Header> {
        let mut length = [0; 8];
        if source.len() < 8 {
            let reason = format!("it has {} bytes, too few for a safetensors header", source.len());
            return Err(format_error(source.name(), None, reason));
        }
        source.fill(0, &mut length).await?;
        let length = Header::checked_length(source.name(), length, source.len())?;
        // At most the file's own size and MAX_HEADER_BYTES: both were compared above.
        let mut text = vec![0; length];
        source.fill(8, &mut text).await?;
        Header::parse(source.name(), &text, source.len())
    }

    /// The length of the JSON text, from the first eight bytes of a file of `file_len` bytes, when it can be true.
    pub fn checked_length(file: &str, first: [u8; 8], file_len: u64) -> Result<usize> {
        let length = u64::from_le_bytes(first);
        let reason = if length == 0 {
            "its header length is 0".into()
        } else if length > MAX_HEADER_BYTES {
            format!(
                "its header length is {length} bytes, above the limit of {MAX_HEADER_BYTES}; not a safetensors file?"
            )
        } else if length > file_len.saturating_sub(8) {
            format!("its header length is {length} bytes, but only {} follow", file_len.saturating_sub(8))
        } else {
            return usize::try_from(length).map_err(|e| format_error(file, None, e.to_string()));
        };
        Err(format_error(file, None, reason))
    }

    /// Checks the JSON text of a header, `text` being everything between the length field and the tensors, for a
    /// file of `file_len` bytes in all.
    pub fn parse(file: &str, text: &[u8], file_len: u64) -> Result<Header> {
        let refuse = |reason: String| format_error(file, None, reason);
        if text.first() != Some(&b'{') {
            return Err(refuse("its header does not begin with `{`; not a safetensors file?".into()));
        }
        let text = std::str::from_utf8(text)
            .map_err(|e| refuse(format!("its header is not UTF-8 from byte {} on", e.valid_up_to() + 8)))?;
        let at = RefCell::new(None);
        let mut json = serde_json::Deserializer::from_str(text);
        let parsed = HeaderSeed { at: &at }.deserialize(&mut json).and_then(|header| json.end().map(|()| header));
        let raw = parsed.map_err(|e| {
            let tensor: Option<Arc<str>> = at.take();
            format_error(file, tensor.as_deref(), format!("its header is not valid: {e}"))
        })?;
        let header_bytes = text.len() as u64 + 8;
        let tensors = checked_ranges(file, raw.tensors, header_bytes, file_len)?;
        let fingerprint = Fingerprint::new().bytes(text.as_bytes()).value();
        Ok(Header { tensors, metadata: raw.metadata, header_bytes, fingerprint })
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| &*t.name == name)
    }
}

/// An [`Error::Format`] whose texts may come from the file: they are kept short and free of control characters, as a
/// hostile name may be megabytes long or drive a terminal.
pub(crate) fn format_error(file: &str, tensor: Option<&str>, reason: impl AsRef<str>) -> Error {
    Error::Format { file: file.into(), tensor: tensor.map(|t| shown(t, 256)), reason: shown(reason.as_ref(), 1024) }
}

fn shown(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for c in text.chars().take(most) {
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    if text.chars().nth(most).is_some() {
        shown.push_str(" ...");
    }
    shown
}

/// Bytes of a tensor, or why there is no such number.
pub(crate) fn byte_length(dtype: FileDType, shape: &[u64]) -> Result<u64, String> {
    let bits = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).and_then(|n| n.checked_mul(dtype.bits()));
    match bits {
        None => Err(format!("{dtype} of shape {shape:?} has more bits than a 64-bit number holds")),
        Some(bits) if bits % 8 != 0 => Err(format!("{dtype} of shape {shape:?} ends within a byte")),
        Some(bits) => Ok(bits / 8),
    }
}

/// Sorts by position and shows that the ranges tile the file from the end of the header to its end.
fn checked_ranges(file: &str, mut tensors: Vec<Raw>, header_bytes: u64, file_len: u64) -> Result<Vec<TensorInfo>> {
    tensors.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let available = file_len.saturating_sub(header_bytes);
    let mut checked: Vec<TensorInfo> = Vec::with_capacity(tensors.len());
    let mut reached = 0;
    for Raw { name, dtype, shape, begin, end } in tensors {
        let refuse = |reason: String| Err(format_error(file, Some(&name), reason));
        if end < begin {
            return refuse(format!("its data_offsets are [{begin}, {end}]: the end is before the begin"));
        }
        match byte_length(dtype, &shape) {
            Err(reason) => return refuse(reason),
            Ok(need) if need != end - begin => {
                return refuse(format!(
                    "{dtype} of shape {shape:?} takes {need} bytes, but data_offsets [{begin}, {end}] span {}",
                    end - begin
                ));
            }
            Ok(_) => {}
        }
        if begin != reached {
            let before = match checked.last() {
                Some(last) => format!("tensor `{}`, which ends at {reached}", last.name),
                None => "the start of the data".into(),
            };
            return refuse(if begin > reached {
                format!("data_offsets [{begin}, {end}] leave a hole of {} bytes after {before}", begin - reached)
            } else {
                format!("data_offsets [{begin}, {end}] overlap {before}")
            });
        }
        if end > available {
            return refuse(format!(
                "data_offsets [{begin}, {end}] end {} bytes beyond the file, which has {available} bytes of data; \
                 it was cut short: fetch it again",
                end - available
            ));
        }
        reached = end;
        // No overflow: `end` is at most `available`, which is `file_len - header_bytes`.
        checked.push(TensorInfo { name, dtype, shape, range: header_bytes + begin..header_bytes + end });
    }
    if reached != available {
        let reason = format!("{} bytes follow the last tensor, which ends at {reached}", available - reached);
        return Err(format_error(file, None, reason));
    }
    Ok(checked)
}

/// An entry as declared: nothing is known of it but its types.
struct Raw {
    name: Arc<str>,
    dtype: FileDType,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

#[derive(Default)]
struct RawHeader {
    tensors: Vec<Raw>,
    metadata: BTreeMap<String, String>,
}

/// Visits the entries one by one, as a map type would drop the first of two equal names unseen. `at` is the name of
/// the entry being read, for the error.
struct HeaderSeed<'a> {
    at: &'a RefCell<Option<Arc<str>>>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = RawHeader;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawHeader, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            let name: Arc<str> = name.into();
            *self.at.borrow_mut() = Some(Arc::clone(&name));
            if !names.insert(Arc::clone(&name)) {
                return Err(A::Error::custom(format_args!("duplicate tensor name `{name}`")));
            }
            if &*name == "__metadata__" {
                header.metadata = map.next_value_seed(Metadata)?;
            } else {
                header.tensors.push(map.next_value_seed(Entry { name })?);
            }
            *self.at.borrow_mut() = None;
        }
        Ok(header)
    }
}

/// `__metadata__`: strings by name, or null.
struct Metadata;

impl<'de> DeserializeSeed<'de> for Metadata {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            if metadata.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate metadata key `{key}`")));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

/// `{"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}`; other fields are ignored, as by the reference.
struct Entry {
    name: Arc<str>,
}

impl<'de> DeserializeSeed<'de> for Entry {
    type Value = Raw;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Entry {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key_seed(Text)? {
            match &*field {
                "dtype" if dtype.is_none() => {
                    let name = map.next_value_seed(Text)?;
                    let known = FileDType::from_safetensors(&name);
                    dtype = Some(known.ok_or_else(|| A::Error::custom(format_args!("unknown dtype `{name}`")))?);
                }
                "shape" if shape.is_none() => shape = Some(map.next_value_seed(Shape)?),
                "data_offsets" if offsets.is_none() => offsets = Some(map.next_value::<(u64, u64)>()?),
                "dtype" | "shape" | "data_offsets" => {
                    return Err(A::Error::custom(format_args!("the field `{field}` is given twice")));
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let dtype = dtype.ok_or_else(|| A::Error::missing_field("dtype"))?;
        let shape = shape.ok_or_else(|| A::Error::missing_field("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?;
        Ok(Raw { name: self.name, dtype, shape, begin, end })
    }
}

/// A string, borrowed from the text where it has no escapes.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// A shape of at most [`MAX_RANK`] dimensions: a list of a hundred million numbers is not built first.
struct Shape;

impl<'de> DeserializeSeed<'de> for Shape {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u64>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Shape {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut shape = Vec::new();
        while let Some(dimension) = seq.next_element()? {
            if shape.len() == MAX_RANK {
                return Err(A::Error::custom(format_args!("more than {MAX_RANK} dimensions")));
            }
            shape.push(dimension);
        }
        Ok(shape)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    fn parse(json: &str, data: u64) -> Result<Header> {
        Header::parse("f.safetensors", json.as_bytes(), 8 + json.len() as u64 + data)
    }

    fn refused(json: &str, data: u64) -> (Option<String>, String) {
        match parse(json, data) {
            Err(Error::Format { file, tensor, reason }) => {
                assert_eq!(file, "f.safetensors");
                (tensor, reason)
            }
            other => panic!("{json}: {other:?}"),
        }
    }

    #[test]
    fn ranges_are_absolute_and_entries_may_come_in_any_order() {
        let json = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"__metadata__":{"k":"v"},
            "a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}}"#;
        let header = parse(json, 12).unwrap();
        let start = json.len() as u64 + 8;
        assert_eq!(header.header_bytes, start);
        let found: Vec<_> = header.tensors.iter().map(|t| (&*t.name, t.range.clone())).collect();
        assert_eq!(found, [("a", start..start + 4), ("b", start + 4..start + 12)]);
        assert_eq!(header.metadata["k"], "v");
        assert_eq!(header.find("a").unwrap().shape, [2, 1]);
        assert!(header.find("c").is_none());
    }

    #[test]
    fn empty_tensors_and_scalars_are_legal_wherever_they_stand() {
        let json = r#"{"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"s":{"dtype":"F32","shape":[],
            "data_offsets":[0,4]},"f":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]},
            "e2":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}}"#;
        assert_eq!(parse(json, 4).unwrap().tensors.len(), 4);
        let inside = r#"{"e":{"dtype":"F32","shape":[0],"data_offsets":[2,2]},
            "s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
        assert!(refused(inside, 4).1.contains("overlap"));
        assert!(parse("{}", 0).unwrap().tensors.is_empty());
    }

    #[test]
    fn a_duplicate_is_called_one_and_named_whether_the_ranges_differ_or_not() {
        for second in ["[0,4]", "[4,8]"] {
            let json = format!(
                r#"{{"t":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},
                "t":{{"dtype":"F32","shape":[1],"data_offsets":{second}}}}}"#
            );
            let (tensor, reason) = refused(&json, 8);
            assert_eq!(tensor.as_deref(), Some("t"));
            assert!(reason.contains("duplicate tensor name"), "{reason}");
        }
        // Written differently, it is the same name still.
        let escaped = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
            "\u0074":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        assert!(refused(escaped, 2).1.contains("duplicate tensor name"));
        let (_, reason) = refused(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0);
        assert!(reason.contains("duplicate metadata key"), "{reason}");
    }

    #[test]
    fn what_is_wrong_with_an_entry_is_said_with_its_name() {
        for (entry, says) in [
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, "before the begin"),
            (r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, "takes 8 bytes"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}"#, "-4"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4.5]}"#, "4.5"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}"#, "4.0"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,"4"]}"#, "string"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#, ""),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#, ""),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999]}"#, ""),
            (r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, "-1"),
            (r#"{"dtype":"F32","shape":1,"data_offsets":[0,4]}"#, "dimensions"),
            (r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#, "64-bit"),
            (r#"{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,4]}"#, "64-bit"),
            (r#"{"dtype":"F4","shape":[1],"data_offsets":[0,1]}"#, "within a byte"),
            (r#"{"dtype":"Q4","shape":[1],"data_offsets":[0,4]}"#, "unknown dtype `Q4`"),
            (r#"{"dtype":7,"shape":[1],"data_offsets":[0,4]}"#, "string"),
            (r#"{"shape":[1],"data_offsets":[0,4]}"#, "dtype"),
            (r#"{"dtype":"F32","data_offsets":[0,4]}"#, "shape"),
            (r#"{"dtype":"F32","shape":[1]}"#, "data_offsets"),
            (r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, "twice"),
            (r#"["F32",[1],[0,4]]"#, "object"),
            ("null", "object"),
        ] {
            let (tensor, reason) = refused(&format!(r#"{{"the.one":{entry}}}"#), 4);
            assert_eq!(tensor.as_deref(), Some("the.one"), "{entry}: {reason}");
            assert!(reason.contains(says), "{entry}: {reason}");
        }
    }

    #[test]
    fn a_shape_is_not_built_beyond_the_largest_rank() {
        let ones = |n: usize| vec!["1"; n].join(",");
        let json = |n| format!(r#"{{"t":{{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}}}}"#, ones(n));
        assert_eq!(parse(&json(MAX_RANK), 1).unwrap().tensors[0].shape.len(), MAX_RANK);
        assert!(refused(&json(MAX_RANK + 1), 1).1.contains("more than 64 dimensions"));
    }

    #[test]
    fn deep_nesting_neither_overflows_the_stack_nor_passes() {
        let deep = |open: &str, n: usize| open.repeat(n);
        refused(&format!("{{\"t\":{}", deep("[", 1_000_000)), 4);
        refused(&format!("{{\"t\":{}", deep("{\"a\":", 1_000_000)), 4);
        refused(&format!("{{\"t\":{{\"unknown\":{}", deep("[", 1_000_000)), 4);
        refused(&format!("{{\"__metadata__\":{{\"a\":{}", deep("[", 1_000_000)), 4);
    }

    #[test]
    fn metadata_is_strings_or_null() {
        assert!(parse(r#"{"__metadata__":null}"#, 0).unwrap().metadata.is_empty());
        for bad in [r#"{"__metadata__":{"a":1}}"#, r#"{"__metadata__":[]}"#, r#"{"__metadata__":"x"}"#] {
            assert_eq!(refused(bad, 0).0.as_deref(), Some("__metadata__"));
        }
    }

    #[test]
    fn unknown_fields_are_ignored_as_by_the_reference() {
        let json = r#"{"t":{"dtype":"U8","note":{"a":[1,2]},"shape":[1],"data_offsets":[0,1]}}"#;
        assert_eq!(parse(json, 1).unwrap().tensors.len(), 1);
    }

    #[test]
    fn a_hostile_name_neither_floods_nor_drives_the_terminal() {
        let json = format!(r#"{{"\u001b[2J{}":{{}}}}"#, "x".repeat(100_000));
        let (tensor, reason) = refused(&json, 0);
        let tensor = tensor.unwrap();
        assert!(tensor.len() < 400 && !tensor.contains('\u{1b}') && tensor.ends_with("..."), "{tensor}");
        let json = format!(r#"{{"t":{{"dtype":"{}"}}}}"#, "x".repeat(100_000));
        assert!(refused(&json, 0).1.len() < 1200 && reason.len() < 1200);
    }

    #[test]
    fn the_fingerprint_follows_the_header_text() {
        let [a, b, c] = ["{}", "{} ", "{}"].map(|json| parse(json, 0).unwrap().fingerprint);
        assert!(a == c && a != b);
    }
}
