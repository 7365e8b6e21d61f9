//! Writing a file: the header first, then the tensors one by one, so that no second copy of the data is needed.

use crate::error::{Error, Result};
use crate::weights::dtype::FileDType;
use crate::weights::safetensors::parse::{MAX_HEADER_BYTES, byte_length, format_error};
use std::collections::{BTreeMap, HashSet};
use std::io;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name in the header.
    pub name: String,
    /// The element type.
    pub dtype: FileDType,
    /// The shape, outermost dimension first.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// A tensor to be written.
    pub fn new(name: impl Into<String>, dtype: impl Into<FileDType>, shape: impl Into<Vec<u64>>) -> TensorSpec {
        TensorSpec { name: name.into(), dtype: dtype.into(), shape: shape.into() }
    }
}

/// Writes one file to any [`io::Write`]; for a file on disk use it within [`crate::rt::file::save_atomically`].
///
/// The layout is the reference library's: tensors sorted by type, widest first, then by name; the header padded with
/// blanks to a multiple of eight bytes.
pub struct Writer<W: io::Write> {
    out: W,
    file: String,
    order: Vec<usize>,
    left: u64,
}

impl<W: io::Write> Writer<W> {
    /// Writes the header. `file` names the output in errors.
    ///
    /// Errors: [`Error::Format`] for a name given twice, `__metadata__` as a name, a shape that overflows, or a header
    /// above the limit; [`Error::Io`].
    pub fn new(
        mut out: W,
        file: &str,
        tensors: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Writer<W>> {
        let mut sizes = Vec::with_capacity(tensors.len());
        let mut names = HashSet::from(["__metadata__"]);
        for spec in tensors {
            let refuse = |reason: String| format_error(file, Some(&spec.name), reason);
            if !names.insert(&spec.name) {
                return Err(refuse("duplicate tensor name".into()));
            }
            sizes.push(byte_length(spec.dtype, &spec.shape).map_err(refuse)?);
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by(|a, b| {
            let (a, b) = (&tensors[*a], &tensors[*b]);
            b.dtype.rank().cmp(&a.dtype.rank()).then_with(|| a.name.cmp(&b.name))
        });
        let (text, end) = header_text(file, tensors, &sizes, &order, metadata)?;
        let written = out.write_all(&(text.len() as u64).to_le_bytes()).and_then(|()| out.write_all(text.as_bytes()));
        written.map_err(|e| Error::Io { file: file.into(), reason: e.to_string() })?;
        Ok(Writer { out, file: file.into(), order, left: end })
    }

    /// The order in which the tensors' bytes must come, as indices into the list given to [`Writer::new`].
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Writes the next bytes of the data: the tensors' bytes in [`Writer::order`], in parts of any size.
    pub fn data(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            let reason = format!("{} bytes were given, but {} are left to write", bytes.len(), self.left);
            return Err(Error::Invalid { what: format!("data of {}", self.file), reason });
        };
        self.out.write_all(bytes).map_err(|e| Error::Io { file: self.file.clone(), reason: e.to_string() })?;
        self.left = left;
        Ok(())
    }

    /// Checks that all bytes came and flushes.
    pub fn finish(mut self) -> Result<W> {
        if self.left != 0 {
            let reason = format!("{} bytes are missing", self.left);
            return Err(Error::Invalid { what: format!("data of {}", self.file), reason });
        }
        self.out.flush().map_err(|e| Error::Io { file: self.file, reason: e.to_string() })?;
        Ok(self.out)
    }
}

/// Writes a whole file of tensors that are in memory, each with its little-endian bytes.
pub fn write<W: io::Write>(
    out: W,
    file: &str,
    tensors: &[(TensorSpec, &[u8])],
    metadata: &BTreeMap<String, String>,
) -> Result<W> {
    let specs: Vec<TensorSpec> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    for (spec, bytes) in tensors {
        let refuse = |reason| format_error(file, Some(&spec.name), reason);
        let need = byte_length(spec.dtype, &spec.shape).map_err(refuse)?;
        if need != bytes.len() as u64 {
            let reason = format!("{} of shape {:?} takes {need} bytes, not {}", spec.dtype, spec.shape, bytes.len());
            return Err(refuse(reason));
        }
    }
    let mut writer = Writer::new(out, file, &specs, metadata)?;
    for index in writer.order().to_vec() {
        writer.data(tensors[index].1)?;
    }
    writer.finish()
}

/// The padded JSON text, and the bytes of data that follow it.
fn header_text(
    file: &str,
    tensors: &[TensorSpec],
    sizes: &[u64],
    order: &[usize],
    metadata: &BTreeMap<String, String>,
) -> Result<(String, u64)> {
    #[derive(serde::Serialize)]
    struct Entry<'a> {
        dtype: &'static str,
        shape: &'a [u64],
        data_offsets: [u64; 2],
    }
    // The entries are joined by hand: a map type would sort them by name, and the order in the text is the file's.
    let quoted = |e: serde_json::Error| format_error(file, None, e.to_string());
    let mut parts = Vec::with_capacity(tensors.len() + 1);
    if !metadata.is_empty() {
        parts.push(format!("\"__metadata__\":{}", serde_json::to_string(metadata).map_err(quoted)?));
    }
    let mut end = 0u64;
    for index in order {
        let (spec, begin) = (&tensors[*index], end);
        end = begin.checked_add(sizes[*index]).ok_or_else(|| format_error(file, Some(&spec.name), "too large"))?;
        let entry = Entry { dtype: spec.dtype.name(), shape: &spec.shape, data_offsets: [begin, end] };
        let name = serde_json::to_string(&spec.name).map_err(quoted)?;
        parts.push(format!("{name}:{}", serde_json::to_string(&entry).map_err(quoted)?));
    }
    let mut text = format!("{{{}}}", parts.join(","));
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    if text.len() as u64 > MAX_HEADER_BYTES {
        return Err(format_error(file, None, format!("a header of {} bytes is above the limit", text.len())));
    }
    Ok((text, end))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;
    use crate::weights::dtype::DType;
    use crate::weights::safetensors::Header;
    use safetensors::tensor::{Dtype, TensorView};
    use std::collections::HashMap;

    #[test]
    fn files_are_the_reference_librarys_byte_for_byte() {
        let data: Vec<u8> = (0..=255).collect();
        let list: Vec<(&str, FileDType, Dtype, Vec<u64>, usize)> = vec![
            ("b", DType::F32.into(), Dtype::F32, vec![2, 3], 24),
            ("a", DType::F32.into(), Dtype::F32, vec![], 4),
            ("z\"quote\u{1f980}", DType::I64.into(), Dtype::I64, vec![1], 8),
            ("h", DType::BF16.into(), Dtype::BF16, vec![3], 6),
            ("i", DType::F16.into(), Dtype::F16, vec![1], 2),
            ("w", DType::I32.into(), Dtype::I32, vec![1, 1], 4),
            ("u", DType::U8.into(), Dtype::U8, vec![5], 5),
            ("none", DType::F32.into(), Dtype::F32, vec![0, 9], 0),
            ("q", FileDType::Other("F8_E4M3"), Dtype::F8_E4M3, vec![3], 3),
        ];
        let ours: Vec<(TensorSpec, &[u8])> = list
            .iter()
            .map(|(name, dtype, _, shape, n)| (TensorSpec::new(*name, *dtype, shape.clone()), &data[..*n]))
            .collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt\n".to_owned())]);
        let file = write(Vec::new(), "f", &ours, &metadata).unwrap();
        let theirs: Vec<(&str, TensorView)> = list
            .iter()
            .map(|(name, _, dtype, shape, n)| {
                let shape = shape.iter().map(|d| *d as usize).collect();
                (*name, TensorView::new(*dtype, shape, &data[..*n]).unwrap())
            })
            .collect();
        let reference = safetensors::serialize(theirs, Some(HashMap::from_iter(metadata.clone()))).unwrap();
        assert_eq!(file, reference);

        let text = &file[8..8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize];
        let header = Header::parse("f", text, file.len() as u64).unwrap();
        assert_eq!(header.metadata, metadata);
        assert_eq!(header.tensors.len(), list.len());
        assert_eq!(header.find("b").unwrap().shape, [2, 3]);
    }

    #[test]
    fn data_may_come_in_parts_of_any_size_but_not_too_much_nor_too_little() {
        let specs = [TensorSpec::new("a", DType::U8, [3]), TensorSpec::new("b", DType::F32, [1])];
        let mut writer = Writer::new(Vec::new(), "f", &specs, &BTreeMap::new()).unwrap();
        assert_eq!(writer.order(), [1, 0]);
        writer.data(&[1, 2, 3]).unwrap();
        writer.data(&[4, 5, 6]).unwrap();
        assert!(matches!(writer.data(&[7, 8]), Err(Error::Invalid { .. })));
        writer.data(&[7]).unwrap();
        assert!(writer.finish().unwrap().ends_with(&[1, 2, 3, 4, 5, 6, 7]));
        let writer = Writer::new(Vec::new(), "f", &specs, &BTreeMap::new()).unwrap();
        assert!(matches!(writer.finish(), Err(Error::Invalid { .. })));
    }

    #[test]
    fn what_could_not_be_read_back_is_not_written() {
        let tensor = |name: &str, shape: &[u64]| TensorSpec::new(name, DType::F32, shape);
        for bad in [
            vec![tensor("a", &[1]), tensor("a", &[2])],
            vec![tensor("__metadata__", &[1])],
            vec![tensor("a", &[u64::MAX, 2])],
            (0..17).map(|i| tensor(&i.to_string(), &[1 << 58])).collect(),
        ] {
            let written = Writer::new(std::io::sink(), "f", &bad, &BTreeMap::new());
            assert!(matches!(written, Err(Error::Format { .. })), "{bad:?}");
        }
        let short = write(Vec::new(), "f", &[(tensor("a", &[2]), &[0; 4][..])], &BTreeMap::new());
        assert!(matches!(short, Err(Error::Format { tensor: Some(t), .. }) if t == "a"));
    }

    #[test]
    fn a_full_disk_is_an_io_error() {
        struct Full;
        impl io::Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = write(Full, "f", &[], &BTreeMap::new()).err().unwrap();
        assert_eq!(error.code(), "io");
    }
}
