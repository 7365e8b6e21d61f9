//! The header parser against random and mutated input, and against the reference library.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

use ebbtide::error::Error;
use ebbtide::weights::safetensors::{Header, TensorSpec, write};
use ebbtide::weights::{Catalog, FileDType, Source};
use pollster::block_on;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const DTYPES: [&str; 9] = ["F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E5M2", "F4"];

/// Reads; whatever comes of it must be a format error or a header that keeps its promises.
fn judge(bytes: &[u8]) -> Option<Header> {
    let source = Source::memory("any", bytes.to_vec());
    let header = match block_on(Header::read(&source)) {
        Ok(header) => header,
        Err(Error::Format { file, .. }) => {
            assert_eq!(file, "any");
            return None;
        }
        Err(other) => panic!("not a format error: {other}"),
    };
    let (mut reached, mut names) = (header.header_bytes, HashSet::new());
    for tensor in &header.tensors {
        assert_eq!(tensor.range.start, reached);
        let bits = tensor.shape.iter().product::<u64>() * tensor.dtype.bits();
        assert_eq!((tensor.range.end - tensor.range.start) * 8, bits);
        assert!(names.insert(&tensor.name));
        reached = tensor.range.end;
    }
    assert_eq!(reached, bytes.len() as u64);
    // What is accepted can be opened and read, every weight of it.
    let catalog = block_on(Catalog::from_sources(vec![source])).unwrap();
    for (i, weight) in catalog.weights().iter().enumerate() {
        let read = block_on(catalog.read(ebbtide::weights::WeightId(i as u32))).unwrap();
        assert_eq!(read, bytes[weight.range.start as usize..weight.range.end as usize]);
    }
    Some(header)
}

fn with_length(json: &[u8], data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.resize(bytes.len() + data, 7);
    bytes
}

/// A file as the writer makes it.
fn valid_file() -> impl Strategy<Value = Vec<u8>> {
    let tensor = ("[a-z.\"\\\\é]{1,6}", 0..DTYPES.len(), prop::collection::vec(0u64..5, 0..4));
    prop::collection::vec(tensor, 0..6).prop_map(|list| {
        let mut specs = BTreeMap::new();
        for (name, dtype, mut shape) in list {
            let dtype = FileDType::from_safetensors(DTYPES[dtype]).unwrap();
            if !dtype.bits().is_multiple_of(8) {
                shape.push(2);
            }
            specs.insert(name.clone(), TensorSpec { name, dtype, shape });
        }
        let data = vec![7; 2000];
        let tensors: Vec<(TensorSpec, &[u8])> = specs
            .into_values()
            .map(|spec| {
                let bits = spec.shape.iter().product::<u64>() * spec.dtype.bits();
                (spec, &data[..bits as usize / 8])
            })
            .collect();
        write(Vec::new(), "made", &tensors, &BTreeMap::from([("k".into(), "v".into())])).unwrap()
    })
}

/// A header of entries that are often wrong in one way, as JSON text, with some bytes of data.
fn plausible() -> impl Strategy<Value = (String, usize)> {
    let number = prop_oneof![
        12 => (0u64..24).prop_map(|n| n.to_string()),
        1 => Just("18446744073709551615".to_owned()),
        1 => Just("-1".to_owned()),
        1 => Just("1.5".to_owned()),
    ];
    let dimension = prop_oneof![8 => 0u64..4, 1 => Just(u64::MAX), 1 => Just(1 << 32)];
    let dtype = prop::sample::select(&["F32", "F16", "U8", "F4", "F6_E2M3", "I64", "NONE"]);
    let entry = (dtype, prop::collection::vec(dimension, 0..3), number.clone(), number);
    (prop::collection::vec(entry, 0..4), 0usize..32).prop_map(|(entries, data)| {
        let entries: Vec<String> = entries
            .iter()
            .enumerate()
            .map(|(i, (dtype, shape, begin, end))| {
                format!(r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
            })
            .collect();
        (format!("{{{}}}", entries.join(",")), data)
    })
}

/// Entries that tile the data, shuffled and then perhaps moved by a little: near the line between right and wrong.
fn nearly_tiling() -> impl Strategy<Value = (String, usize)> {
    let sizes = prop::collection::vec(0u64..6, 1..6);
    (sizes, any::<u64>(), prop_oneof![2 => Just(0i64), 1 => -2i64..3], any::<prop::sample::Index>(), 0usize..3)
        .prop_map(|(sizes, seed, shift, which, extra)| {
            let mut end = 0;
            let mut entries = Vec::new();
            for (i, size) in sizes.iter().enumerate() {
                let begin = end;
                end += size;
                let moved = if which.index(sizes.len()) == i { shift } else { 0 };
                let (b, e) = ((begin as i64 + moved).max(0), (end as i64 + moved).max(0));
                entries.push(format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{b},{e}]}}"#));
            }
            let by = seed as usize % entries.len();
            entries.rotate_left(by);
            (format!("{{{}}}", entries.join(",")), end as usize + if seed % 3 == 0 { extra } else { 0 })
        })
}

/// Both read it; they must agree, as nothing generated here is in the list of documented differences.
fn agree(bytes: &[u8]) -> Result<(), TestCaseError> {
    let ours = judge(bytes);
    match (&ours, safetensors::SafeTensors::read_metadata(bytes)) {
        (Some(header), Ok((length, theirs))) => {
            prop_assert_eq!(header.header_bytes, length as u64 + 8);
            prop_assert_eq!(header.tensors.len(), theirs.tensors().len());
            for tensor in &header.tensors {
                let other = theirs.info(&tensor.name).unwrap();
                prop_assert_eq!(tensor.dtype.name(), format!("{:?}", other.dtype));
                prop_assert_eq!(tensor.range.start - header.header_bytes, other.data_offsets.0 as u64);
                prop_assert_eq!(tensor.range.end - header.header_bytes, other.data_offsets.1 as u64);
            }
        }
        (None, Err(_)) => {}
        (ours, theirs) => prop_assert!(false, "ours: {:?}, theirs: {:?}", ours, theirs.map(|t| t.0)),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        judge(&bytes);
        judge(&with_length(&bytes, 3));
        let mut text = vec![b'{'];
        text.extend(&bytes);
        judge(&with_length(&text, 3));
    }

    #[test]
    fn random_text_of_the_formats_own_words_never_panics(
        words in prop::collection::vec(prop::sample::select(&[
            "{", "}", "[", "]", ":", ",", "\"t\"", "\"dtype\"", "\"shape\"", "\"data_offsets\"", "\"F32\"", "\"U8\"",
            "0", "1", "4", "-1", "1e400", "18446744073709551616", "null", "true", "\"__metadata__\"", "\"\\ud800\"",
        ]), 0..40),
        data in 0usize..9,
    ) {
        judge(&with_length(format!("{{{}", words.concat()).as_bytes(), data));
    }

    #[test]
    fn mutated_files_never_panic_and_keep_the_promises_if_accepted(
        file in valid_file(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
        more in 0usize..3,
    ) {
        let mut bytes = file;
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        bytes.resize(bytes.len() + more, 0);
        judge(&bytes);
    }

    #[test]
    fn what_the_writer_makes_is_accepted_here_and_by_the_reference(file in valid_file()) {
        prop_assert!(judge(&file).is_some());
        agree(&file)?;
    }

    #[test]
    fn plausible_headers_are_judged_as_by_the_reference((json, data) in plausible()) {
        agree(&with_length(json.as_bytes(), data))?;
    }

    #[test]
    fn shuffled_and_shifted_tilings_are_judged_as_by_the_reference((json, data) in nearly_tiling()) {
        agree(&with_length(json.as_bytes(), data))?;
    }
}

#[test]
fn the_documented_differences_from_the_reference_are_as_documented() {
    let t = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let rank = format!(r#"{{"t":{{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}}}}"#, vec!["1"; 65].join(","));
    for json in [
        format!(r#"{{"t":{t},"t":{t}}}"#),
        r#"{"__metadata__":{"a":"1","a":"2"}}"#.into(),
        format!(r#" {{"t":{t}}}"#),
        r#"{"t":["U8",[1],[0,1]]}"#.into(),
        rank,
    ] {
        let data = usize::from(json.contains("U8"));
        let bytes = with_length(json.as_bytes(), data);
        assert!(judge(&bytes).is_none(), "{json}");
        assert!(safetensors::SafeTensors::read_metadata(&bytes).is_ok(), "{json}");
    }
}
