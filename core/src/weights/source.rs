//! Where weight bytes come from: a file, memory, or the caller's own reader.
//!
//! Everything that streams weights reads through [`Source`], so one place keeps these promises: a read is complete or
//! an error, never zeros in place of missing bytes; bytes of a file that changed after it was opened are never
//! returned as good; two opens of one file are one source, so that its weights are not loaded twice.

use crate::error::{Error, Result};
use crate::rt::file::{FileId, PositionedFile};
use crate::rt::{Shared, Sink, Waiting};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A reader of the caller's, for [`Source::custom`]. Offsets and lengths are in bytes.
pub trait ReadAt: Send + Sync {
    /// The name that errors show; its last path component without the extension names the default segment.
    fn name(&self) -> &str;
    /// The length when opened.
    fn len(&self) -> u64;
    /// Reads up to `buf.len()` bytes at `offset` and returns how many came. Fewer are asked for again; 0 is the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// An [`Error::SourceChanged`] if the bytes are no longer those of the open. Called after every read.
    fn unchanged(&self) -> Result<()>;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A reader that has to be waited for: a file of the browser, a server. For [`Source::waiting`].
pub trait Fetch: Shared {
    /// The name that errors show; its last path component without the extension names the default segment.
    fn name(&self) -> &str;
    /// The length when opened.
    fn len(&self) -> u64;
    /// Fills `sink` from the bytes at `offset`, which lie within the length: completely, or it is an error. Bytes that are no
    /// longer those of the open are an [`Error::SourceChanged`].
    fn fetch<'a>(&'a self, offset: u64, sink: Sink<'a>) -> Waiting<'a, Result<()>>;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

enum Inner {
    File(PositionedFile),
    Memory { name: String, bytes: Arc<[u8]> },
    Custom(Arc<dyn ReadAt>),
    Waiting(Arc<dyn Fetch>),
}

/// Bytes that weights are read from. Clones are the same source.
#[derive(Clone)]
pub struct Source(Arc<Inner>);

/// What makes two sources the same one; see [`Source::identity`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Identity {
    /// A file, by device and inode or by canonical path.
    File(FileId),
    /// A block of memory, by address.
    Memory(usize),
    /// A reader of the caller's, by address.
    Custom(usize),
}

impl Source {
    /// Opens a file for positioned reads and records its size, modification time and, on Unix, its inode.
    ///
    /// Errors: [`Error::Io`] if there is no such regular file, and always in a browser.
    pub fn open(path: impl AsRef<Path>) -> Result<Source> {
        Ok(Source(Arc::new(Inner::File(PositionedFile::open(path.as_ref())?))))
    }

    /// Bytes in memory, under a name for errors and segments.
    pub fn memory(name: impl Into<String>, bytes: impl Into<Arc<[u8]>>) -> Source {
        Source(Arc::new(Inner::Memory { name: name.into(), bytes: bytes.into() }))
    }

    /// A reader of the caller's.
    pub fn custom(reader: Arc<dyn ReadAt>) -> Source {
        Source(Arc::new(Inner::Custom(reader)))
    }

    /// A reader of the caller's that has to be waited for: only [`Source::fill`] reads from it.
    pub fn waiting(reader: Arc<dyn Fetch>) -> Source {
        Source(Arc::new(Inner::Waiting(reader)))
    }

    /// The path or name.
    pub fn name(&self) -> &str {
        match &*self.0 {
            Inner::File(file) => file.name(),
            Inner::Memory { name, .. } => name,
            Inner::Custom(reader) => reader.name(),
            Inner::Waiting(reader) => reader.name(),
        }
    }

    /// The name's last path component without its extension: how the default segment of this file is called.
    pub fn stem(&self) -> &str {
        let last = self.name().rsplit(['/', '\\']).next().unwrap_or_default();
        match last.rsplit_once('.') {
            Some((stem, _)) if !stem.is_empty() => stem,
            _ => last,
        }
    }

    /// The length in bytes, as it was when opened.
    pub fn len(&self) -> u64 {
        match &*self.0 {
            Inner::File(file) => file.len(),
            Inner::Memory { bytes, .. } => bytes.len() as u64,
            Inner::Custom(reader) => reader.len(),
            Inner::Waiting(reader) => reader.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Which source this is: equal for two opens of one file, also through links, and for two names of one block of
    /// memory. Valid as long as one of the sources compared is held.
    pub fn identity(&self) -> Identity {
        match &*self.0 {
            Inner::File(file) => Identity::File(file.id().clone()),
            Inner::Memory { bytes, .. } => Identity::Memory(bytes.as_ptr().addr()),
            Inner::Custom(reader) => Identity::Custom(Arc::as_ptr(reader).addr()),
            Inner::Waiting(reader) => Identity::Custom(Arc::as_ptr(reader).addr()),
        }
    }

    /// [`Error::SourceChanged`] if the source is no longer as it was when opened.
    pub fn unchanged(&self) -> Result<()> {
        match &*self.0 {
            Inner::File(file) => file.unchanged(),
            // What has to be waited for looks at every read by itself.
            Inner::Memory { .. } | Inner::Waiting(_) => Ok(()),
            Inner::Custom(reader) => reader.unchanged(),
        }
    }

    /// Fills `sink` from the bytes at `offset`. Blocks; allocates nothing unless it fails.
    ///
    /// Short reads are continued. Errors: [`Error::SourceChanged`] if the source changed since it was opened (looked at
    /// *after* the read, so bytes that changed under it are caught as well), [`Error::Io`] if the system reports
    /// an error or the bytes end before the range does. After an error the content of `sink` must not be used.
    pub fn read_exact_at(&self, offset: u64, sink: &mut [u8]) -> Result<()> {
        let end = self.end_of(offset, sink.len())?;
        let mut done = 0;
        while let Some(rest) = sink.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = offset + done as u64;
            let left = rest.len();
            match self.read_some(at, rest) {
                Ok(0) => {
                    self.unchanged()?;
                    let reason = format!("it ends at byte {at}, while bytes {offset} to {end} were read");
                    return Err(self.io(reason));
                }
                Ok(n) if n <= left => done += n,
                Ok(n) => return Err(self.io(format!("the reader returned {n} bytes for {left} at byte {at}"))),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    // A file that went away says so first: it is the cause, and the remedy is another.
                    self.unchanged()?;
                    return Err(self.io(format!("reading {left} bytes at byte {at} failed: {e}")));
                }
            }
        }
        self.unchanged()
    }

    /// As [`Source::read_exact_at`], for callers that may wait for a source which cannot block.
    pub async fn fill(&self, offset: u64, sink: &mut [u8]) -> Result<()> {
        self.fill_sink(offset, Sink::new(sink)).await
    }

    /// As [`Source::fill`], into whatever memory the platform uploads from.
    pub async fn fill_sink(&self, offset: u64, sink: Sink<'_>) -> Result<()> {
        match &*self.0 {
            Inner::Waiting(reader) => {
                self.end_of(offset, sink.len())?;
                reader.fetch(offset, sink).await
            }
            _ => sink.by_pieces(|at, piece| self.read_exact_at(offset + at as u64, piece)),
        }
    }

    /// Where a range ends; an error unless that is within the source.
    fn end_of(&self, offset: u64, len: usize) -> Result<u64> {
        if let Some(end) = offset.checked_add(len as u64).filter(|end| *end <= self.len()) {
            return Ok(end);
        }
        self.unchanged()?;
        Err(self.io(format!("{len} bytes at byte {offset} were asked for, but it has {}", self.len())))
    }

    fn read_some(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match &*self.0 {
            Inner::File(file) => file.read_at(offset, buf),
            Inner::Memory { bytes, .. } => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                let there = bytes.get(from..).unwrap_or_default();
                let n = there.len().min(buf.len());
                buf[..n].copy_from_slice(&there[..n]);
                Ok(n)
            }
            Inner::Custom(reader) => reader.read_at(offset, buf),
            Inner::Waiting(_) => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "it has to be waited for, which this caller cannot"))
            }
        }
    }

    fn io(&self, reason: String) -> Error {
        Error::Io { file: self.name().to_owned(), reason }
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Source {}

impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("name", &self.name()).field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn a_read_outside_of_the_bytes_is_an_error_and_never_zeros() {
        let source = Source::memory("m", vec![1u8, 2, 3]);
        let mut sink = [9; 2];
        source.read_exact_at(1, &mut sink).unwrap();
        assert_eq!(sink, [2, 3]);
        for offset in [2, 3, 4, u64::MAX - 1, u64::MAX] {
            let error = source.read_exact_at(offset, &mut sink).unwrap_err();
            assert_eq!(error.code(), "io");
        }
        assert_eq!(sink, [2, 3]);
        source.read_exact_at(3, &mut []).unwrap();
    }

    #[test]
    fn memory_is_one_source_by_address_and_not_by_content_or_name() {
        let bytes: Arc<[u8]> = vec![1u8, 2].into();
        let (a, b) = (Source::memory("a", Arc::clone(&bytes)), Source::memory("b", bytes));
        assert_eq!(a, b);
        assert_ne!(a, Source::memory("a", vec![1u8, 2]));
        assert_eq!(a, a.clone());
    }

    #[test]
    fn a_stem_is_the_last_component_without_its_extension() {
        for (name, stem) in [
            ("x/down.safetensors", "down"),
            ("C:\\m\\up.safetensors", "up"),
            ("model", "model"),
            (".hidden", ".hidden"),
            ("a.b.c", "a.b"),
            ("x/", ""),
        ] {
            assert_eq!(Source::memory(name, Vec::new()).stem(), stem);
        }
    }
}
