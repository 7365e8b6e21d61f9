//! Files that lie, files that are cut short, files that change, disks that fail: each must end in a typed error that
//! names file and tensor, and none in wrong numbers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

use ebbtide::error::{Error, Result};
use ebbtide::rt::file::save_atomically;
use ebbtide::weights::safetensors::{Header, TensorSpec, write};
use ebbtide::weights::{Catalog, DType, ReadAt, Source};
use pollster::block_on;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// A file of this JSON text and so many bytes of data.
fn raw(json: &[u8], data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.extend((0..data).map(|i| i as u8 | 1));
    bytes
}

/// Written to a real file, opened as a model; the error must be a format error of that file.
fn refused(bytes: &[u8]) -> (Option<String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let from_file = format_error(block_on(Catalog::open(&path)), "hostile.safetensors");
    let memory = Source::memory("hostile.safetensors", bytes.to_vec());
    let from_memory = format_error(block_on(Catalog::from_sources(vec![memory])), "hostile.safetensors");
    assert_eq!(from_file, from_memory, "file and memory must behave alike");
    from_file
}

fn format_error<T>(result: Result<T>, name: &str) -> (Option<String>, String) {
    match result {
        Err(Error::Format { file, tensor, reason }) => {
            assert!(file.ends_with(name), "{file}");
            (tensor, reason)
        }
        Err(other) => panic!("not a format error: {other}"),
        Ok(_) => panic!("was accepted"),
    }
}

#[track_caller]
fn refuses(bytes: &[u8], tensor: Option<&str>, says: &str) {
    let (named, reason) = refused(bytes);
    assert_eq!(named.as_deref(), tensor, "{reason}");
    assert!(reason.contains(says), "{reason}");
}

fn entry(name: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#)
}

fn with(entries: &[String], data: usize) -> Vec<u8> {
    raw(format!("{{{}}}", entries.join(",")).as_bytes(), data)
}

#[test]
fn header_lengths_that_cannot_be_true_are_refused() {
    for len in 0..8 {
        refuses(&vec![0; len], None, "too few");
    }
    refuses(&0u64.to_le_bytes(), None, "length is 0");
    let good = with(&[entry("t", "[1]", "[0,4]")], 4);
    for (length, says) in [(0, "0"), (100_000_001, "limit"), (u64::MAX, "limit"), (1 << 63, "limit")] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&u64::to_le_bytes(length));
        refuses(&bytes, None, says);
    }
    for more in [1u64, 2, 1000, 99_000_000] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&(good.len() as u64 - 8 + more).to_le_bytes());
        refuses(&bytes, None, "only");
    }
    // 7: the text is cut within the first name.
    let mut bytes = good.clone();
    bytes[..8].copy_from_slice(&7u64.to_le_bytes());
    refuses(&bytes, Some("t"), "not valid");
    // Some bytes of tensors taken for text.
    let mut bytes = good.clone();
    bytes[..8].copy_from_slice(&(good.len() as u64 - 8 - 2).to_le_bytes());
    refuses(&bytes, None, "not valid");
}

#[test]
fn headers_that_are_no_json_object_are_refused() {
    refuses(&raw(b"[]", 0), None, "begin with `{`");
    refuses(&raw(b" {}", 0), None, "begin with `{`");
    refuses(&raw("\u{feff}{}".as_bytes(), 0), None, "begin with `{`");
    refuses(&raw(b"{\"\xff\xfe\":1}", 0), None, "not UTF-8 from byte 10");
    refuses(&raw(b"{", 0), None, "not valid");
    refuses(&raw(b"{}x", 0), None, "not valid");
    refuses(&raw(b"{}\0", 0), None, "not valid");
    refuses(&raw(b"{}{}", 0), None, "not valid");
    refuses(&raw(b"<!DOCTYPE html><html>Not Found</html>", 0), None, "begin with `{`");
    // A pointer file in place of the blob, as after a clone without large files: its text is read as a length.
    refuses(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", None, "not a safetensors file");
}

#[test]
fn offsets_and_shapes_that_do_not_fit_are_refused_by_the_tensors_name() {
    for (shape, offsets, says) in [
        ("[1]", "[1000,1000]", "takes 4 bytes"),
        ("[1]", "[4,0]", "before the begin"),
        ("[1]", "[18446744073709551615,0]", "before the begin"),
        ("[0]", "[18446744073709551615,18446744073709551615]", "hole"),
        ("[250]", "[0,1000]", "996 bytes beyond the file"),
        ("[4611686018427387900]", "[0,18446744073709551600]", "64-bit"),
        ("[2]", "[0,4]", "takes 8 bytes"),
        ("[4294967296,4294967296]", "[0,4]", "64-bit"),
        ("[4294967296,4294967296,0]", "[0,0]", "64-bit"),
        ("[1]", "[-4,0]", "not valid"),
        ("[1]", "[-0,4]", "not valid"),
        ("[1]", "[0.5,4.5]", "not valid"),
        ("[1]", "[0,4e0]", "not valid"),
        ("[1.0]", "[0,4]", "not valid"),
        ("[1]", "[0,36893488147419103236]", "not valid"),
        ("[1]", "[0]", "not valid"),
        ("[1]", "[]", "not valid"),
        ("[1]", "null", "not valid"),
    ] {
        refuses(&with(&[entry("model.q_proj", shape, offsets)], 4), Some("model.q_proj"), says);
    }
}

#[test]
fn a_declared_size_is_never_allocated() {
    // 2^60 bytes declared in 100: an allocation of that size would abort the process.
    let entries = [entry("t", "[288230376151711744]", "[0,1152921504606846976]")];
    refuses(&with(&entries, 4), Some("t"), "beyond the file");
    let mut lying = raw(b"{}", 0);
    lying[..8].copy_from_slice(&99_999_999u64.to_le_bytes());
    refuses(&lying, None, "only 2 follow");
}

#[test]
fn overlaps_and_holes_are_refused_wherever_they_are() {
    let (a, b) = (entry("k_proj", "[2]", "[0,8]"), entry("v_proj", "[2]", "[0,8]"));
    refuses(&with(&[a.clone(), b], 8), Some("v_proj"), "overlap tensor `k_proj`");
    refuses(&with(&[a.clone(), entry("b", "[2]", "[7,15]")], 15), Some("b"), "overlap");
    refuses(&with(&[a.clone(), entry("inside", "[1]", "[2,6]")], 8), Some("inside"), "overlap");
    refuses(&with(&[a.clone(), entry("b", "[1]", "[16,20]")], 20), Some("b"), "hole of 8 bytes after tensor `k_proj`");
    refuses(&with(&[entry("a", "[1]", "[8,12]")], 12), Some("a"), "hole of 8 bytes after the start");
    refuses(&with(&[entry("b", "[1]", "[9,13]"), a.clone()], 13), Some("b"), "hole of 1 bytes");
    // An empty tensor within another's bytes, and one behind a hole.
    refuses(&with(&[a.clone(), entry("e", "[0]", "[4,4]")], 8), Some("e"), "overlap");
    refuses(&with(&[a.clone(), entry("e", "[0]", "[12,12]")], 8), Some("e"), "hole");
    // Unsorted entries are legal, also with empty ones between.
    let entries = [entry("z", "[1]", "[8,12]"), entry("e", "[0]", "[8,8]"), a];
    let file = Source::memory("m", with(&entries, 12));
    assert_eq!(block_on(Catalog::from_sources(vec![file])).unwrap().weights().len(), 3);
}

#[test]
fn one_trailing_byte_is_refused_as_by_the_reference_library() {
    let mut bytes = with(&[entry("t", "[1]", "[0,4]")], 4);
    assert!(block_on(Catalog::from_sources(vec![Source::memory("m", bytes.clone())])).is_ok());
    bytes.push(0);
    refuses(&bytes, None, "1 bytes follow the last tensor");
    assert!(safetensors::SafeTensors::deserialize(&bytes).is_err());
    refuses(&raw(b"{}", 1), None, "1 bytes follow");
}

#[test]
fn a_name_given_twice_is_called_a_duplicate() {
    let t = entry("t", "[1]", "[0,4]");
    refuses(&with(&[t.clone(), t.clone()], 4), Some("t"), "duplicate tensor name");
    refuses(&with(&[t.clone(), entry("t", "[1]", "[4,8]")], 8), Some("t"), "duplicate tensor name");
    let metadata = r#""__metadata__":{}"#.to_owned();
    refuses(&with(&[metadata.clone(), t, metadata], 4), Some("__metadata__"), "duplicate");
}

/// A real file of two tensors, with bytes that are never zero.
struct Model {
    _folder: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
}

fn model() -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (a, b) = (vec![0xaa; 4000], vec![0xbb; 8000]);
    let tensors = [
        (TensorSpec::new("first", DType::F32, [1000]), a.as_slice()),
        (TensorSpec::new("second", DType::BF16, [4000]), b.as_slice()),
    ];
    let bytes = write(Vec::new(), "model", &tensors, &BTreeMap::new()).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    Model { _folder: folder, path, bytes }
}

impl Model {
    /// Rewrites the file in place, as a resumed download or an editor does.
    fn rewrite(&self, bytes: &[u8], age: u64) {
        std::fs::write(&self.path, bytes).unwrap();
        let time = SystemTime::now() - Duration::from_secs(age);
        std::fs::File::options().append(true).open(&self.path).unwrap().set_modified(time).unwrap();
    }
}

#[test]
fn a_file_cut_short_is_refused_at_open_with_the_missing_tensor() {
    let model = model();
    let len = model.bytes.len();
    for (keep, tensor) in [(len - 1, "second"), (len - 8000, "second"), (len - 8001, "first"), (len - 12000, "first")] {
        model.rewrite(&model.bytes[..keep], 0);
        let (named, reason) = format_error(block_on(Catalog::open(&model.path)), "model.safetensors");
        assert_eq!(named.as_deref(), Some(tensor));
        assert!(reason.contains("cut short"), "{reason}");
    }
    for keep in 0..len - 12000 {
        model.rewrite(&model.bytes[..keep], 0);
        format_error(block_on(Catalog::open(&model.path)), "model.safetensors");
    }
}

#[test]
fn a_file_cut_short_while_in_use_is_noticed_before_missing_bytes_are_used() {
    let len = model().bytes.len();
    for keep in [len - 1, len - 8000, len - 12000, 8, 0] {
        let model = model();
        let catalog = block_on(Catalog::open(&model.path)).unwrap();
        let [first, second] = ["first", "second"].map(|n| catalog.find(n).unwrap());
        assert_eq!(block_on(catalog.read(second)).unwrap(), [0xbb; 8000]);
        let file = std::fs::File::options().write(true).open(&model.path).unwrap();
        file.set_len(keep as u64).unwrap();
        for id in [second, first] {
            let error = block_on(catalog.read(id)).unwrap_err();
            assert_eq!(error.code(), "source-changed", "{error}");
            assert!(error.to_string().contains(&keep.to_string()), "{error}");
        }
        // Grown back with zeros, as a sparse download would: the size is right again, the time is not.
        file.set_len(len as u64).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        assert_eq!(block_on(catalog.read(second)).unwrap_err().code(), "source-changed");
    }
}

#[test]
fn a_file_replaced_or_removed_while_in_use_is_noticed() {
    let model = model();
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    let id = catalog.find("first").unwrap();
    assert_eq!(block_on(catalog.read(id)).unwrap(), [0xaa; 4000]);

    // Rewritten in place with other bytes of the same size.
    let mut other = model.bytes.clone();
    other.iter_mut().rev().take(12000).for_each(|b| *b ^= 1);
    model.rewrite(&other, 60);
    let error = block_on(catalog.read(id)).unwrap_err();
    assert!(error.code() == "source-changed" && error.to_string().contains("modification time"), "{error}");

    // Another file renamed over it, of the same size and even the same time.
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    let modified = std::fs::metadata(&model.path).unwrap().modified().unwrap();
    let beside = model.path.with_extension("new");
    std::fs::write(&beside, &model.bytes).unwrap();
    std::fs::File::options().append(true).open(&beside).unwrap().set_modified(modified).unwrap();
    std::fs::rename(&beside, &model.path).unwrap();
    if cfg!(unix) {
        let error = block_on(catalog.read(id)).unwrap_err();
        assert!(error.code() == "source-changed" && error.to_string().contains("took its place"), "{error}");
    }

    // Removed. The open handle could still read it; the next run could not.
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    std::fs::remove_file(&model.path).unwrap();
    assert_eq!(block_on(catalog.read(id)).unwrap_err().code(), "source-changed");
}

#[test]
fn an_untouched_file_stays_readable_when_it_is_linked_or_its_rights_change() {
    let model = model();
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    std::fs::hard_link(&model.path, model.path.with_extension("link")).unwrap();
    let mut rights = std::fs::metadata(&model.path).unwrap().permissions();
    rights.set_readonly(true);
    std::fs::set_permissions(&model.path, rights).unwrap();
    assert_eq!(block_on(catalog.read(catalog.find("second").unwrap())).unwrap(), [0xbb; 8000]);
}

#[test]
fn a_file_cut_and_grown_again_in_the_middle_of_reads_never_yields_its_zeros() {
    for round in 0..20 {
        let model = model();
        model.rewrite(&model.bytes, 3600);
        let catalog = block_on(Catalog::open(&model.path)).unwrap();
        let id = catalog.find("second").unwrap();
        let (path, len) = (model.path.clone(), model.bytes.len() as u64);
        let cutter = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(50 * round));
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(len - 12000).unwrap();
            file.set_len(len).unwrap();
        });
        let error = loop {
            match block_on(catalog.read(id)) {
                Ok(bytes) => assert!(bytes.iter().all(|b| *b == 0xbb), "zeros in round {round}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.code(), "source-changed");
        cutter.join().unwrap();
    }
}

#[test]
fn saving_over_a_file_that_is_in_use_leaves_a_whole_file_and_an_error_and_no_mixture() {
    let model = model();
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    let id = catalog.find("first").unwrap();
    let tensors = [(TensorSpec::new("first", DType::F32, [1000]), &[0xcc; 4000][..])];
    save_atomically(&model.path, |out| write(out, "model", &tensors, &BTreeMap::new()).map(|_| ())).unwrap();
    assert_eq!(block_on(catalog.read(id)).unwrap_err().code(), "source-changed");
    let catalog = block_on(Catalog::open(&model.path)).unwrap();
    assert_eq!(block_on(catalog.read(catalog.find("first").unwrap())).unwrap(), [0xcc; 4000]);
}

#[test]
fn a_reader_finds_a_whole_file_at_every_moment_of_many_saves() {
    let model = model();
    let path = model.path.clone();
    let writer = std::thread::spawn(move || {
        for round in 1..=100u8 {
            let data = vec![round; 40_000];
            let tensors = [(TensorSpec::new("t", DType::U8, [40_000]), data.as_slice())];
            save_atomically(&path, |out| write(out, "t", &tensors, &BTreeMap::new()).map(|_| ())).unwrap();
        }
    });
    while !writer.is_finished() {
        // A save may fall between open and read: then it is the typed error, and never a format error.
        let catalog = match block_on(Catalog::open(&model.path)) {
            Err(error) => {
                assert_eq!(error.code(), "source-changed", "{error}");
                continue;
            }
            Ok(catalog) => catalog,
        };
        let Ok(id) = catalog.find("t") else { continue };
        match block_on(catalog.read(id)) {
            Ok(bytes) => assert!(bytes.iter().all(|b| *b == bytes[0])),
            Err(error) => assert_eq!(error.code(), "source-changed"),
        }
    }
    writer.join().unwrap();
}

/// What a [`Faulty`] reader does to a read.
#[derive(Clone, Copy)]
enum Fault {
    None,
    /// At most so many bytes come at once.
    Short(usize),
    /// Every other call is interrupted by a signal, and one byte comes at once.
    Interrupted,
    /// The disk fails from this byte on.
    Failing(u64),
    /// The bytes end here, although the length says otherwise.
    EndsAt(u64),
    /// More bytes than asked for are said to have come.
    TooMany,
    /// The source says that it changed.
    Changed,
}

struct Faulty {
    bytes: Vec<u8>,
    fault: Mutex<Fault>,
    calls: AtomicUsize,
}

impl ReadAt for Faulty {
    fn name(&self) -> &str {
        "faulty.safetensors"
    }
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let (mut end, mut most) = (self.bytes.len(), buf.len());
        match *self.fault.lock().unwrap() {
            Fault::None | Fault::Changed => {}
            Fault::Short(n) => most = most.min(n),
            Fault::Interrupted if call.is_multiple_of(2) => return Err(io::ErrorKind::Interrupted.into()),
            Fault::Interrupted => most = 1,
            Fault::Failing(at) if offset + buf.len() as u64 > at && offset >= at => {
                return Err(io::Error::from_raw_os_error(5));
            }
            Fault::Failing(at) => end = at as usize,
            Fault::EndsAt(at) => end = at as usize,
            Fault::TooMany => return Ok(buf.len() + 1),
        }
        let rest = self.bytes.get(offset as usize..end).unwrap_or_default();
        let n = rest.len().min(most);
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
    fn unchanged(&self) -> Result<()> {
        match *self.fault.lock().unwrap() {
            Fault::Changed => Err(Error::SourceChanged { file: self.name().into(), reason: "injected".into() }),
            _ => Ok(()),
        }
    }
}

fn faulty() -> (Arc<Faulty>, Catalog) {
    let bytes = model().bytes;
    let reader = Arc::new(Faulty { bytes, fault: Mutex::new(Fault::None), calls: AtomicUsize::new(0) });
    let catalog = block_on(Catalog::from_sources(vec![Source::custom(reader.clone())])).unwrap();
    (reader, catalog)
}

#[test]
fn short_and_interrupted_reads_are_continued_until_all_bytes_are_there() {
    let (reader, catalog) = faulty();
    let id = catalog.find("second").unwrap();
    for fault in [Fault::Short(1), Fault::Short(7), Fault::Short(7999), Fault::Interrupted, Fault::None] {
        *reader.fault.lock().unwrap() = fault;
        reader.calls.store(0, Ordering::Relaxed);
        assert_eq!(block_on(catalog.read(id)).unwrap(), [0xbb; 8000]);
        let again = Header::read(&catalog.sources()[0]);
        assert_eq!(block_on(again).unwrap().tensors.len(), 2);
    }
}

#[test]
fn a_failing_disk_is_an_io_error_that_says_where() {
    let (reader, catalog) = faulty();
    let id = catalog.find("second").unwrap();
    let begin = catalog.weight(id).range.start;
    for at in [begin, begin + 1, begin + 7999] {
        *reader.fault.lock().unwrap() = Fault::Failing(at);
        match block_on(catalog.read(id)) {
            Err(Error::Io { file, reason }) => {
                assert_eq!(file, "faulty.safetensors");
                assert!(reason.contains(&at.to_string()) && reason.contains("os error 5"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    // The disk answers again: nothing of the failure is remembered.
    *reader.fault.lock().unwrap() = Fault::None;
    assert_eq!(block_on(catalog.read(id)).unwrap(), [0xbb; 8000]);
}

#[test]
fn bytes_that_end_early_are_an_error_and_never_zeros() {
    let (reader, catalog) = faulty();
    let id = catalog.find("second").unwrap();
    let range = catalog.weight(id).range.clone();
    for at in [range.end - 1, range.start, 0] {
        *reader.fault.lock().unwrap() = Fault::EndsAt(at);
        let error = block_on(catalog.read(id)).unwrap_err();
        assert!(error.code() == "io" && error.to_string().contains("ends at byte"), "{error}");
    }
}

#[test]
fn a_reader_that_returns_more_than_was_asked_for_is_not_believed() {
    let (reader, catalog) = faulty();
    *reader.fault.lock().unwrap() = Fault::TooMany;
    let error = block_on(catalog.read(catalog.find("first").unwrap())).unwrap_err();
    assert_eq!(error.code(), "io");
}

#[test]
fn a_source_that_says_it_changed_is_believed_after_the_bytes_came() {
    let (reader, catalog) = faulty();
    *reader.fault.lock().unwrap() = Fault::Changed;
    let error = block_on(catalog.read(catalog.find("first").unwrap())).unwrap_err();
    assert_eq!(error.code(), "source-changed");
}
