//! Catalogs of real files: identity, segments, pieces, indices, links, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

use ebbtide::error::Error;
use ebbtide::weights::index::{INDEX_FILE, Index};
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::weights::{Catalog, DType, FileDType, Source, WeightId};
use pollster::block_on;
use std::collections::BTreeMap;
use std::path::Path;

type Tensor<'a> = (&'a str, FileDType, Vec<u64>, &'a [u8]);

fn file(tensors: &[Tensor]) -> Vec<u8> {
    let list: Vec<(TensorSpec, &[u8])> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (TensorSpec::new(*name, *dtype, shape.clone()), *bytes))
        .collect();
    write(Vec::new(), "made by the test", &list, &BTreeMap::new()).unwrap()
}

fn f32s<'a>(name: &'a str, bytes: &'a [u8]) -> Tensor<'a> {
    (name, DType::F32.into(), vec![bytes.len() as u64 / 4], bytes)
}

fn put(folder: &Path, name: &str, tensors: &[Tensor]) {
    std::fs::write(folder.join(name), file(tensors)).unwrap();
}

fn open(path: impl AsRef<Path>) -> Catalog {
    block_on(Catalog::open(path)).unwrap()
}

fn refused(path: impl AsRef<Path>) -> Error {
    match block_on(Catalog::open(path)) {
        Ok(_) => panic!("was opened"),
        Err(e) => e,
    }
}

fn index(folder: &Path, map: &[(&str, &str)]) {
    let map: BTreeMap<_, _> = map.iter().copied().collect();
    let text = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    std::fs::write(folder.join(INDEX_FILE), text.to_string()).unwrap();
}

#[test]
fn each_file_of_a_folder_is_a_segment_of_its_stem_with_short_names() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "down.safetensors", &[f32s("w", &[1; 16]), f32s("b", &[2; 4])]);
    put(folder.path(), "up.safetensors", &[f32s("w", &[3; 8])]);
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let catalog = open(folder.path());
    let names: Vec<_> = catalog.segments().map(|s| s.name.to_string()).collect();
    assert_eq!(names, ["down", "up"]);
    let (down, up) = (catalog.segment("down").unwrap(), catalog.segment("up").unwrap());
    assert_eq!(down.names().collect::<Vec<_>>(), ["b", "w"]);
    assert_eq!((catalog.segment_bytes(&down), catalog.segment_bytes(&up)), (20, 8));
    assert_ne!(down.weight("w").unwrap(), up.weight("w").unwrap());
    assert_eq!(block_on(catalog.read(up.weight("w").unwrap())).unwrap(), [3; 8]);
    assert_eq!(block_on(catalog.read(down.weight("b").unwrap())).unwrap(), [2; 4]);
}

#[test]
fn a_name_in_two_files_without_an_index_must_be_asked_of_a_segment() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "a.safetensors", &[f32s("w", &[1; 4]), f32s("only", &[1; 4])]);
    put(folder.path(), "b.safetensors", &[f32s("w", &[1; 4])]);
    let catalog = open(folder.path());
    let error = catalog.find("w").unwrap_err();
    assert_eq!(error.code(), "invalid");
    let text = error.to_string();
    assert!(text.contains("`a`") && text.contains("`b`") && text.contains("segment"), "{text}");
    assert_eq!(catalog.weight(catalog.find("only").unwrap()).name(), "only");
    assert_eq!(catalog.names().collect::<Vec<_>>(), ["only", "w"]);
}

#[test]
fn equal_bytes_at_two_ranges_are_two_weights() {
    let catalog = block_on(Catalog::from_sources(vec![Source::memory(
        "m.safetensors",
        file(&[f32s("a", &[7; 8]), f32s("b", &[7; 8])]),
    )]))
    .unwrap();
    assert_ne!(catalog.find("a").unwrap(), catalog.find("b").unwrap());
    assert_eq!(catalog.weights().len(), 2);
}

#[test]
fn one_file_given_twice_or_by_two_names_is_one_source_and_its_weights_one_each() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "a.safetensors", &[f32s("w", &[1; 4])]);
    let path = folder.path().join("a.safetensors");
    let twice = vec![Source::open(&path).unwrap(), Source::open(&path).unwrap()];
    assert_eq!(twice[0], twice[1]);
    let catalog = block_on(Catalog::from_sources(twice)).unwrap();
    assert_eq!((catalog.sources().len(), catalog.weights().len(), catalog.segments().count()), (1, 1, 1));

    std::fs::hard_link(&path, folder.path().join("b.safetensors")).unwrap();
    let catalog = open(folder.path());
    assert_eq!((catalog.sources().len(), catalog.weights().len(), catalog.segments().count()), (1, 1, 2));
    let of = |segment: &str| catalog.segment(segment).unwrap().weight("w").unwrap();
    assert_eq!(of("a"), of("b"));
    assert_eq!(catalog.find("w").unwrap(), of("a"));
}

#[test]
fn two_files_of_one_stem_are_refused_with_both_names() {
    let bytes = |n: u8| file(&[f32s("w", &[n; 4])]);
    let sources = vec![Source::memory("x/a.safetensors", bytes(1)), Source::memory("y/a.safetensors", bytes(2))];
    let error = block_on(Catalog::from_sources(sources)).unwrap_err();
    assert_eq!(error.code(), "invalid");
    assert!(error.to_string().contains("x/a.safetensors") && error.to_string().contains("y/a.safetensors"));
}

#[cfg(unix)]
#[test]
fn shards_that_are_links_as_in_the_hubs_cache_are_followed_and_known_as_the_files_they_are() {
    let root = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (root.path().join("blobs"), root.path().join("snapshots/1"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    put(&blobs, "aaaa", &[f32s("x", &[1; 4])]);
    put(&blobs, "bbbb", &[f32s("y", &[2; 4])]);
    for (blob, name) in [("aaaa", "model-1.safetensors"), ("bbbb", "model-2.safetensors")] {
        std::os::unix::fs::symlink(Path::new("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    index(&snapshot, &[("x", "model-1.safetensors"), ("y", "model-2.safetensors")]);
    let catalog = open(&snapshot);
    assert_eq!(block_on(catalog.read(catalog.find("y").unwrap())).unwrap(), [2; 4]);
    assert_eq!(catalog.segment("model-1").unwrap().names().collect::<Vec<_>>(), ["x"]);
    assert_eq!(catalog.sources()[0], Source::open(blobs.join("aaaa")).unwrap());
    // A link that is pointed elsewhere is a changed file.
    std::fs::remove_file(snapshot.join("model-1.safetensors")).unwrap();
    std::os::unix::fs::symlink(blobs.join("bbbb"), snapshot.join("model-1.safetensors")).unwrap();
    let error = block_on(catalog.read(catalog.find("x").unwrap())).unwrap_err();
    assert_eq!(error.code(), "source-changed");
}

#[test]
fn an_index_is_obeyed_and_may_be_named_itself() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    put(folder.path(), "one.safetensors", &[f32s("a", &[1; 4]), f32s("c", &[9; 4])]);
    put(folder.path(), "sub/one.safetensors", &[f32s("b", &[2; 4]), f32s("c", &[3; 4])]);
    put(folder.path(), "not-listed.safetensors", &[f32s("a", &[4; 4])]);
    let map = [("a", "one.safetensors"), ("b", "sub/one.safetensors"), ("c", "sub/one.safetensors")];
    index(folder.path(), &map);
    for path in [folder.path().to_owned(), folder.path().join(INDEX_FILE)] {
        let catalog = open(path);
        assert_eq!(catalog.sources().len(), 2);
        // `c` is in both shards: the index decides, the other is reached through its segment.
        let found = catalog.find("c").unwrap();
        assert_eq!(block_on(catalog.read(found)).unwrap(), [3; 4]);
        let other = catalog.segment("one").unwrap().weight("c").unwrap();
        assert_eq!(block_on(catalog.read(other)).unwrap(), [9; 4]);
        assert_eq!(catalog.segment("sub/one").unwrap().weight("c").unwrap(), found);
    }
}

#[test]
fn an_index_that_disagrees_with_the_shards_names_tensor_and_both_shards() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "one.safetensors", &[f32s("a", &[1; 4])]);
    put(folder.path(), "two.safetensors", &[f32s("b", &[2; 4])]);
    index(folder.path(), &[("a", "two.safetensors"), ("b", "two.safetensors"), ("x", "one.safetensors")]);
    let text = refused(folder.path()).to_string();
    for part in [INDEX_FILE, "`a`", "`two.safetensors`", "`one.safetensors`"] {
        assert!(text.contains(part), "{text}");
    }
    index(folder.path(), &[("a", "one.safetensors"), ("x", "two.safetensors")]);
    let text = refused(folder.path()).to_string();
    assert!(text.contains("`x`") && text.contains("no shard has it"), "{text}");
    index(folder.path(), &[("a", "one.safetensors"), ("b", "three.safetensors")]);
    let error = refused(folder.path());
    assert_eq!(error.code(), "io");
    assert!(error.to_string().contains("three.safetensors") && error.to_string().contains(INDEX_FILE), "{error}");
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    put(root.path(), "outside.safetensors", &[f32s("t", &[1; 4])]);
    put(&folder, "in.safetensors", &[f32s("t", &[1; 4])]);
    let absolute = root.path().join("outside.safetensors");
    for shard in [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        absolute.to_str().unwrap(),
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "\\\\?\\C:\\outside.safetensors",
        "./in.safetensors",
        "in.safetensors:stream",
        "in.safetensors\0",
        "in.safetensors/",
        "",
        ".",
    ] {
        index(&folder, &[("t", shard)]);
        let error = refused(&folder);
        assert_eq!(error.code(), "format", "{shard:?}");
        assert!(error.to_string().contains("`t`") && error.to_string().contains("refused"), "{error}");
    }
}

#[test]
fn a_shard_that_is_not_given_is_named() {
    let index = Index::parse("i.json", br#"{"weight_map":{"a":"1","b":"2"}}"#).unwrap();
    let given = BTreeMap::from([("1".to_owned(), Source::memory("1", file(&[f32s("a", &[1; 4])])))]);
    let error = block_on(Catalog::from_index(&index, given)).unwrap_err();
    assert_eq!(error.code(), "not-found");
    assert!(error.to_string().contains("`2`"));
}

#[test]
fn a_folder_without_tensors_and_a_path_without_a_file_are_typed_errors() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(refused(folder.path()).code(), "not-found");
    assert_eq!(refused(folder.path().join("none")).code(), "io");
}

#[test]
fn a_tensor_of_another_type_is_listed_and_refused_as_a_weight_only() {
    let other = FileDType::from_safetensors("F8_E4M3").unwrap();
    let bytes = file(&[("f8", other, vec![3], &[1; 3]), f32s("w", &[1; 4])]);
    let catalog = block_on(Catalog::from_sources(vec![Source::memory("m.safetensors", bytes)])).unwrap();
    let listed: Vec<_> = catalog.files()[0].header.tensors.iter().map(|t| (&*t.name, t.dtype.name())).collect();
    assert_eq!(listed, [("w", "F32"), ("f8", "F8_E4M3")]);
    assert_eq!(catalog.names().collect::<Vec<_>>(), ["w"]);
    let error = catalog.find("f8").unwrap_err();
    assert_eq!(error.code(), "format");
    assert!(error.to_string().contains("F8_E4M3") && error.to_string().contains("m.safetensors"), "{error}");
    let segment = catalog.segment("m").unwrap();
    assert!(segment.weight("f8").unwrap_err().to_string().contains("F8_E4M3"));
    assert!(segment.weight("w").is_ok());
}

#[test]
fn an_empty_tensor_is_a_weight_without_bytes() {
    let bytes = file(&[("e", DType::F32.into(), vec![0, 4], &[]), f32s("w", &[1; 4])]);
    let catalog = block_on(Catalog::from_sources(vec![Source::memory("m", bytes)])).unwrap();
    let id = catalog.find("e").unwrap();
    let weight = catalog.weight(id);
    assert_eq!((weight.bytes(), weight.pieces.len(), weight.shape.as_slice()), (0, 1, [0, 4].as_slice()));
    assert_eq!(block_on(catalog.read(id)).unwrap(), [0u8; 0]);
    assert_eq!(catalog.segment_bytes(&catalog.segment("m").unwrap()), 4);
}

#[test]
fn a_name_that_is_not_there_comes_with_those_that_are_near() {
    let bytes = file(&[f32s("layers.0.q.weight", &[1; 4]), f32s("layers.0.q.bias", &[1; 4])]);
    let catalog = block_on(Catalog::from_sources(vec![Source::memory("m", bytes)])).unwrap();
    let text = catalog.find("q.bias").unwrap_err().to_string();
    assert!(text.contains("`layers.0.q.bias`") && !text.contains("`layers.0.q.weight`"), "{text}");
    let error = catalog.segment("x").unwrap_err();
    assert!(error.code() == "not-found" && error.to_string().contains("`m`"), "{error}");
}

fn three() -> (Catalog, [WeightId; 3]) {
    let bytes = file(&[f32s("a", &[1; 4]), f32s("b", &[2; 4]), f32s("c", &[3; 4])]);
    let catalog = block_on(Catalog::from_sources(vec![Source::memory("m", bytes)])).unwrap();
    let ids = ["a", "b", "c"].map(|n| catalog.find(n).unwrap());
    (catalog, ids)
}

#[test]
fn a_defined_segment_takes_its_weights_out_of_the_files_segment() {
    let (mut catalog, [a, b, c]) = three();
    let before = catalog.segment("m").unwrap();
    let block = catalog.define_segment("block", &[("q", c), ("k", a)]).unwrap();
    assert_eq!(block.names().collect::<Vec<_>>(), ["q", "k"]);
    assert_eq!(block.weight("q").unwrap(), c);
    let rest = catalog.segment("m").unwrap();
    assert_eq!(rest.names().collect::<Vec<_>>(), ["b"]);
    // The id that was handed out before keeps its meaning.
    assert_ne!(rest.id, before.id);
    assert_eq!(catalog.segment_by_id(before.id), Some(&before));
    catalog.define_segment("m2", &[("b", b)]).unwrap();
    assert_eq!(catalog.segment("m").unwrap_err().code(), "not-found");
    let names: Vec<_> = catalog.segments().map(|s| s.name.to_string()).collect();
    assert_eq!(names, ["block", "m2"]);
    // A tied weight may be in two segments of the caller's.
    let tied = catalog.define_segment("head", &[("w", a)]).unwrap();
    assert_eq!(tied.weight("w").unwrap(), block.weight("k").unwrap());
    assert_eq!(catalog.segment("block").unwrap(), block);
}

#[test]
fn a_refused_definition_changes_nothing() {
    let (mut catalog, [a, b, c]) = three();
    let before = catalog.segment("m").unwrap();
    let foreign = WeightId(99);
    for error in [
        catalog.define_segment("m", &[("a", a)]).unwrap_err(),
        catalog.define_segment("s", &[("a", a), ("a", b)]).unwrap_err(),
        catalog.define_segment("s", &[("a", a), ("b", foreign)]).unwrap_err(),
        catalog.define_segment_of_pieces("s", &[("a", a, 1)]).unwrap_err(),
        catalog.define_segment_of_pieces("s", &[("a", a, 0), ("a", a, 0)]).unwrap_err(),
        catalog.define_segment_of_pieces("s", &[("a", a, 0), ("a", b, 0)]).unwrap_err(),
        block_on(catalog.read(foreign)).unwrap_err(),
    ] {
        assert_eq!(error.code(), "invalid", "{error}");
    }
    assert_eq!(catalog.segment("m").unwrap(), before);
    // The file's own name is free once the file's segment is empty.
    let all = catalog.define_segment("m", &[("a", a), ("b", b), ("c", c)]).unwrap();
    assert_eq!(catalog.segment("m").unwrap(), all);
}

/// A source of 300 MiB that has no bytes but its header: zeros are made as they are read.
struct Sparse {
    header: Vec<u8>,
    len: u64,
}

impl ebbtide::weights::ReadAt for Sparse {
    fn name(&self) -> &str {
        "sparse.safetensors"
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        for (i, byte) in buf.iter_mut().enumerate() {
            *byte = self.header.get(offset as usize + i).copied().unwrap_or(0);
        }
        Ok(buf.len())
    }
    fn unchanged(&self) -> ebbtide::error::Result<()> {
        Ok(())
    }
}

fn large(shape: &[u64]) -> Catalog {
    let bytes = shape.iter().product::<u64>() * 2;
    let specs = [TensorSpec::new("w", DType::BF16, shape)];
    let mut header = Vec::new();
    ebbtide::weights::safetensors::Writer::new(&mut header, "h", &specs, &BTreeMap::new()).unwrap();
    let len = header.len() as u64 + bytes;
    block_on(Catalog::from_sources(vec![Source::custom(std::sync::Arc::new(Sparse { header, len }))])).unwrap()
}

#[test]
fn a_large_tensor_comes_in_pieces_which_segments_can_be_made_of() {
    let mut catalog = large(&[76_800, 2048]);
    let id = catalog.find("w").unwrap();
    let rows: Vec<_> = catalog.weight(id).pieces.iter().map(|p| p.rows.clone()).collect();
    assert_eq!(rows, [0..32_768, 32_768..65_536, 65_536..76_800]);
    let segment = catalog.segment("sparse").unwrap();
    assert_eq!(segment.entries.len(), 3);
    assert_eq!(segment.names().collect::<Vec<_>>(), ["w"]);
    assert_eq!(catalog.segment_bytes(&segment), 76_800 * 4096);
    let head = catalog.define_segment_of_pieces("head.2", &[("w", id, 2)]).unwrap();
    assert_eq!(catalog.segment_bytes(&head), 11_264 * 4096);
    let rest: Vec<u32> = catalog.segment("sparse").unwrap().entries.iter().map(|e| e.piece).collect();
    assert_eq!(rest, [0, 1]);
    let two = catalog.define_segment_of_pieces("head.0", &[("w", id, 0), ("w", id, 1)]).unwrap();
    assert_eq!(two.names().collect::<Vec<_>>(), ["w"]);
    assert_eq!(catalog.segment("sparse").unwrap_err().code(), "not-found");
}

#[test]
fn a_read_into_host_memory_is_capped_and_stays_within_the_weight() {
    let catalog = large(&[76_800, 2048]);
    let id = catalog.find("w").unwrap();
    assert!(
        matches!(block_on(catalog.read(id)), Err(Error::Limit { need: 314_572_800, have, .. }) if have == 64 << 20)
    );
    assert!(matches!(block_on(catalog.read_capped(id, 0..11, 10)), Err(Error::Limit { need: 11, have: 10, .. })));
    assert_eq!(block_on(catalog.read_capped(id, 314_572_790..314_572_800, 10)).unwrap(), [0; 10]);
    for range in [314_572_799..314_572_801, 0..u64::MAX] {
        assert_eq!(block_on(catalog.read_capped(id, range, u64::MAX)).unwrap_err().code(), "invalid");
    }
}

#[test]
fn a_row_above_128_mib_is_refused_by_name() {
    let specs = [TensorSpec::new("wide", DType::U8, [2, (128 << 20) + 1])];
    let mut header = Vec::new();
    ebbtide::weights::safetensors::Writer::new(&mut header, "h", &specs, &BTreeMap::new()).unwrap();
    let len = header.len() as u64 + (256 << 20) + 2;
    let source = Source::custom(std::sync::Arc::new(Sparse { header, len }));
    let error = block_on(Catalog::from_sources(vec![source])).unwrap_err();
    assert!(error.code() == "limit" && error.to_string().contains("`wide`"), "{error}");
}

#[test]
fn a_file_that_claims_an_absurd_size_is_refused_before_its_pieces_are_counted() {
    let specs = [TensorSpec::new("w", DType::U8, [1 << 60])];
    let mut header = Vec::new();
    ebbtide::weights::safetensors::Writer::new(&mut header, "h", &specs, &BTreeMap::new()).unwrap();
    let len = header.len() as u64 + (1 << 60);
    let source = Source::custom(std::sync::Arc::new(Sparse { header, len }));
    let error = block_on(Catalog::from_sources(vec![source])).unwrap_err();
    assert!(error.code() == "limit" && error.to_string().contains("sparse.safetensors"), "{error}");
}

#[test]
fn the_fingerprint_is_of_the_files_and_not_of_where_they_are_or_in_which_order_they_came() {
    let a = || Source::memory("x/a.safetensors", file(&[f32s("w", &[1; 4])]));
    let b = |n: &str, len: usize| Source::memory(n, file(&[f32s("w", &vec![1; len])]));
    let print = |sources| block_on(Catalog::from_sources(sources)).unwrap().fingerprint();
    let first = print(vec![a(), b("b", 8)]);
    assert_eq!(first, print(vec![b("elsewhere/b.safetensors", 8), a()]));
    assert_ne!(first, print(vec![a(), b("b", 12)]));
    assert_ne!(first, print(vec![a(), b("c", 8)]));
    assert_ne!(first, print(vec![a()]));
}
