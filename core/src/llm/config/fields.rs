//! The fields of one JSON object, taken out one by one, so that what nobody asked for is found and refused.
//!
//! A configuration that is read by "get what I know" ignores whatever was invented after the program: the model loads and
//! computes something else. Here each field is taken by name or allowed by name, and [`Fields::finish`] refuses the rest.
//! A name that stands twice is refused too: readers differ in which one they believe.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::weights::safetensors::format_error;

/// An object's fields that were not taken yet.
pub(crate) struct Fields {
    file: String,
    /// What stands before a field's name in errors: empty at the top, `rope_scaling.` within.
    path: String,
    left: BTreeMap<String, Value>,
}

impl Fields {
    /// Parses the text of a file that holds one object.
    pub fn parse(file: &str, text: &[u8]) -> Result<Fields> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let parsed = Unique.deserialize(&mut json).and_then(|value| json.end().map(|()| value));
        match parsed {
            Ok(Value::Object(object)) => {
                Ok(Fields { file: file.into(), path: String::new(), left: object.into_iter().collect() })
            }
            Ok(_) => Err(format_error(file, None, "it holds no JSON object")),
            Err(e) => Err(format_error(file, None, format!("not valid JSON: {e}"))),
        }
    }

    /// An error about a field.
    pub fn error(&self, field: &str, reason: impl fmt::Display) -> Error {
        format_error(&self.file, None, format!("field `{}{field}`: {reason}", self.path))
    }

    fn wrong(&self, field: &str, expected: &str, got: &Value) -> Error {
        let got: String = got.to_string().chars().take(80).collect();
        self.error(field, format_args!("expected {expected}, got {got}"))
    }

    /// The field's value; `null` counts as absent.
    pub fn value(&mut self, field: &str) -> Option<Value> {
        self.left.remove(field).filter(|value| !value.is_null())
    }

    /// Whether the field stands there, `null` or not.
    pub fn has(&self, field: &str) -> bool {
        self.left.contains_key(field)
    }

    /// A whole number within `range`.
    pub fn integer(&mut self, field: &str, range: std::ops::RangeInclusive<u64>) -> Result<Option<u64>> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(self.wrong(field, &expected, &value))
            }
        }
    }

    /// As [`Fields::integer`], but it must be there.
    pub fn required(&mut self, field: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
        self.integer(field, range)?.ok_or_else(|| self.error(field, "it is missing"))
    }

    /// A finite number of at least 0.
    pub fn number(&mut self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && x >= 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(field, "a finite number of at least 0", &value)),
        }
    }

    /// A number above 0.
    pub fn positive(&mut self, field: &str) -> Result<Option<f64>> {
        match self.number(field)? {
            Some(x) if x > 0.0 => Ok(Some(x)),
            Some(x) => Err(self.error(field, format_args!("expected a number above 0, got {x}"))),
            None => Ok(None),
        }
    }

    /// True or false.
    pub fn flag(&mut self, field: &str) -> Result<Option<bool>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(value) => Err(self.wrong(field, "true or false", &value)),
        }
    }

    /// A flag of which only one state is supported; absent is that state.
    pub fn only(&mut self, field: &str, supported: bool) -> Result<()> {
        match self.flag(field)? {
            Some(flag) if flag != supported => {
                Err(self
                    .error(field, format_args!("{flag} changes the result and is not supported; only {supported} is")))
            }
            _ => Ok(()),
        }
    }

    /// A field that is supported only as absent, `null`, or an empty list or object.
    pub fn nothing(&mut self, field: &str) -> Result<()> {
        match self.value(field) {
            None => Ok(()),
            Some(Value::Array(list)) if list.is_empty() => Ok(()),
            Some(Value::Object(map)) if map.is_empty() => Ok(()),
            Some(_) => Err(self.error(field, "it changes the result and is not supported")),
        }
    }

    /// A text.
    pub fn text(&mut self, field: &str) -> Result<Option<String>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(field, "a text", &value)),
        }
    }

    /// A list of texts.
    pub fn texts(&mut self, field: &str) -> Result<Option<Vec<String>>> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let texts = value.as_array().and_then(|list| list.iter().map(|v| v.as_str().map(str::to_owned)).collect());
        texts.map(Some).ok_or_else(|| self.wrong(field, "a list of texts", &value))
    }

    /// Token ids: a number or a list of numbers; empty if absent.
    pub fn ids(&mut self, field: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let Some(value) = self.value(field) else {
            return Ok(Vec::new());
        };
        let ids = match &value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong(field, "a token id or a list of token ids", &value))
    }

    /// An object's fields.
    pub fn object(&mut self, field: &str) -> Result<Option<Fields>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields {
                file: self.file.clone(),
                path: format!("{}{field}.", self.path),
                left: object.into_iter().collect(),
            })),
            Some(value) => Err(self.wrong(field, "an object", &value)),
        }
    }

    /// Drops fields whose value cannot change the result.
    pub fn ignore(&mut self, fields: &[&str]) {
        for field in fields {
            self.left.remove(*field);
        }
    }

    /// Refuses the first field that was neither taken nor ignored.
    pub fn finish(self) -> Result<()> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(field) => Err(self.error(
                field,
                "it is not known here and may change the result, so the file is refused rather than read without it",
            )),
        }
    }
}

/// Reads a value like serde_json's own, but refuses an object that names a field twice. Depth is bounded by serde_json.
struct Unique;

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_string<E>(self, v: String) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(Unique)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Unique)?;
            if object.insert(key.clone(), value).is_some() {
                let key: String = key.chars().take(80).collect();
                return Err(A::Error::custom(format_args!("field {key:?} stands twice")));
            }
        }
        Ok(Value::Object(object))
    }
}
