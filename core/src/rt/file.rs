//! Files of the native side: positioned reads that notice a changed file, and saving that is all or nothing.
//!
//! Weights are read by position into memory of ours and never mapped: a mapped file that is cut short reads as zeros or
//! kills the process, and neither can be caught. A file is stamped when it is opened (size, modification time and, on
//! Unix, device and inode) and the stamp is compared with what the *path* names at every read, so that a file that was
//! replaced, cut short or re-linked while a training runs ends in [`Error::SourceChanged`] instead of wrong numbers.
//! In a browser there is no file system: opening fails there with [`Error::Io`].

use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// What makes two opens of one file the same file, also through symbolic or hard links.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileId {
    /// Unix: device and inode number. They are not reused while the file is held open.
    Inode {
        /// The device.
        dev: u64,
        /// The inode.
        ino: u64,
    },
    /// Elsewhere: the canonical path.
    Path(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
    inode: Option<(u64, u64)>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Stamp {
        Stamp { len: metadata.len(), modified: metadata.modified().ok(), inode: inode(metadata) }
    }

    /// What differs in `now`, in words; `None` if nothing does.
    fn difference(&self, now: &Stamp) -> Option<String> {
        if now.inode != self.inode {
            Some("another file took its place".into())
        } else if now.len != self.len {
            Some(format!("its size was {} bytes and is {} bytes", self.len, now.len))
        } else if now.modified != self.modified {
            Some("its modification time is another".into())
        } else {
            None
        }
    }
}

#[cfg(unix)]
fn inode(metadata: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn inode(_: &Metadata) -> Option<(u64, u64)> {
    None
}

#[cfg(unix)]
fn read_some(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buf, offset)
}

#[cfg(windows)]
fn read_some(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buf, offset)
}

#[cfg(not(any(unix, windows)))]
fn read_some(_: &File, _: u64, _: &mut [u8]) -> io::Result<usize> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "there is no file system here"))
}

/// The [`Error::Io`] of `path`.
pub fn io_error(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Io { file: path.display().to_string(), reason: reason.to_string() }
}

/// A file open for positioned reads.
#[derive(Debug)]
pub struct PositionedFile {
    /// Absolute, links not resolved: a link that is pointed elsewhere is a change of the file.
    path: PathBuf,
    name: String,
    id: FileId,
    file: File,
    stamp: Stamp,
}

impl PositionedFile {
    /// Opens a regular file (links are followed) and stamps it.
    pub fn open(path: &Path) -> Result<PositionedFile> {
        let err = |e: io::Error| io_error(path, e);
        // Asked before opening: opening a named pipe would wait for a writer for ever.
        if !std::fs::metadata(path).map_err(err)?.is_file() {
            return Err(io_error(path, "not a regular file"));
        }
        let file = File::open(path).map_err(err)?;
        let stamp = Stamp::of(&file.metadata().map_err(err)?);
        let id = match stamp.inode {
            Some((dev, ino)) => FileId::Inode { dev, ino },
            None => FileId::Path(std::fs::canonicalize(path).map_err(err)?),
        };
        let absolute = std::path::absolute(path).map_err(err)?;
        Ok(PositionedFile { path: absolute, name: path.display().to_string(), id, file, stamp })
    }

    /// The path as it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size in bytes when opened.
    pub fn len(&self) -> u64 {
        self.stamp.len
    }

    /// Whether the file had no bytes when opened.
    pub fn is_empty(&self) -> bool {
        self.stamp.len == 0
    }

    /// Which file this is.
    pub fn id(&self) -> &FileId {
        &self.id
    }

    /// Reads up to `buf.len()` bytes at `offset`; fewer may come, and 0 means the end of the file.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        read_some(&self.file, offset, buf)
    }

    /// Whether the path still names the file that was opened, with the size and time it had then.
    pub fn unchanged(&self) -> Result<()> {
        let changed = |reason: String| Error::SourceChanged { file: self.name.clone(), reason };
        let now = std::fs::metadata(&self.path).map_err(|e| changed(format!("it cannot be looked at: {e}")))?;
        if let Some(reason) = self.stamp.difference(&Stamp::of(&now)) {
            return Err(changed(reason));
        }
        // With an inode, the path's stamp speaks for the handle as well; without one, ask the handle too.
        if self.stamp.inode.is_none() {
            let held = self.file.metadata().map_err(|e| changed(format!("it cannot be looked at: {e}")))?;
            if let Some(reason) = self.stamp.difference(&Stamp::of(&held)) {
                return Err(changed(reason));
            }
        }
        Ok(())
    }
}

/// Whether `path` (links followed) is a folder. [`Error::Io`] if there is nothing.
pub fn is_folder(path: &Path) -> Result<bool> {
    Ok(std::fs::metadata(path).map_err(|e| io_error(path, e))?.is_dir())
}

/// Whether `path` (links followed) is a regular file.
pub fn is_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file())
}

/// Makes a folder, and those above it, where there is none. [`Error::Io`] if it cannot be.
pub fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|e| io_error(path, e))
}

/// The regular files (links followed) of `folder` with this extension, sorted by name. Sub-folders are not entered.
pub fn files_with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| io_error(folder, e))? {
        let path = entry.map_err(|e| io_error(folder, e))?.path();
        if path.extension().is_some_and(|e| e == extension) && is_file(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Writes `path` so that a reader, or a crash at any moment, finds either the old file whole or the new one whole.
///
/// `write` fills a temporary file in the same folder; it is flushed to the disk and then renamed over `path`. When
/// anything fails, the temporary file is removed and `path` is as before. If `path` is a symbolic link, the link is
/// replaced, not the file it points to (a model cache's blob must not change under its other names).
pub fn save_atomically(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let file_name = path.file_name().ok_or_else(|| io_error(path, "not a file name"))?;
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let (temporary, file) = loop {
        let mut name = OsString::from(".");
        name.push(file_name);
        name.push(format!(".{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let temporary = folder.join(name);
        match File::options().write(true).create_new(true).open(&temporary) {
            Ok(file) => break (temporary, file),
            // Left by a process of the same number that was killed.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(io_error(path, e)),
        }
    };
    let err = |e: io::Error| io_error(path, e);
    let written = (|| {
        let mut out = BufWriter::with_capacity(1 << 16, file);
        write(&mut out)?;
        let file = out.into_inner().map_err(|e| err(e.into_error()))?;
        file.sync_all().map_err(err)?;
        drop(file);
        std::fs::rename(&temporary, path).map_err(err)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
        return written;
    }
    sync_folder(folder).map_err(err)
}

/// Makes the folder `path`, which must not be there yet, whole or not at all: `fill` writes into a temporary folder beside
/// it, which is renamed when all is there. When anything fails, the temporary folder is removed.
///
/// Errors: [`Error::Invalid`] if there is anything at `path`, a link that leads nowhere included; what `fill` returns.
pub async fn save_folder_atomically<T>(path: &Path, fill: impl AsyncFnOnce(&Path) -> Result<T>) -> Result<T> {
    let taken = || Error::Invalid {
        what: path.display().to_string(),
        reason: "it is there already and is not overwritten; choose another place or remove it".into(),
    };
    if std::fs::symlink_metadata(path).is_ok() {
        return Err(taken());
    }
    let name = path.file_name().ok_or_else(|| io_error(path, "not a folder name"))?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.tmp", std::process::id()));
    let temporary = parent.join(hidden);
    std::fs::create_dir(&temporary).map_err(|e| io_error(&temporary, e))?;
    let result = fill(&temporary).await.and_then(|value| {
        sync_folder(&temporary).map_err(|e| io_error(&temporary, e))?;
        // Someone may have made it meanwhile: an empty folder would be replaced by the rename.
        if std::fs::symlink_metadata(path).is_ok() {
            return Err(taken());
        }
        std::fs::rename(&temporary, path).map_err(|e| io_error(path, e))?;
        Ok(value)
    });
    match result {
        Ok(value) => {
            sync_folder(parent).map_err(|e| io_error(path, e))?;
            Ok(value)
        }
        Err(error) => {
            let _ = std::fs::remove_dir_all(&temporary);
            Err(error)
        }
    }
}

/// A new file that is written once and then flushed to the disk. Within [`save_folder_atomically`], where nothing else
/// sees it before it is whole.
pub struct NewFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl NewFile {
    /// Makes it; there must be none.
    pub fn create(path: &Path) -> Result<NewFile> {
        let file = File::options().write(true).create_new(true).open(path).map_err(|e| io_error(path, e))?;
        Ok(NewFile { path: path.to_owned(), out: BufWriter::with_capacity(1 << 16, file) })
    }

    /// Ends it; when this returns it is on the disk.
    pub fn finish(self) -> Result<()> {
        let err = |e: io::Error| io_error(&self.path, e);
        self.out.into_inner().map_err(|e| err(e.into_error()))?.sync_all().map_err(err)
    }
}

impl Write for NewFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.out.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Makes a rename in `folder` last through a power cut.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // Some network file systems do not know it for folders; the file itself is complete either way.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other,
    }
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    fn entries(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_save_replaces_the_file_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        for content in [b"old".as_slice(), b"new, longer"] {
            save_atomically(&path, |out| out.write_all(content).map_err(|e| io_error(&path, e))).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), content);
            assert_eq!(entries(folder.path()), ["a.safetensors"]);
        }
    }

    #[test]
    fn a_save_that_fails_half_way_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"old").unwrap();
        let failed = save_atomically(&path, |out| {
            out.write_all(&[1; 1 << 20]).map_err(|e| io_error(&path, e))?;
            Err(Error::Cancelled)
        });
        assert!(matches!(failed, Err(Error::Cancelled)));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), ["a"]);
    }

    #[test]
    fn a_save_that_cannot_be_renamed_removes_its_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        std::fs::create_dir(&path).unwrap();
        let error = save_atomically(&path, |_| Ok(())).unwrap_err();
        assert_eq!(error.code(), "io");
        assert_eq!(entries(folder.path()), ["taken"]);
        assert_eq!(save_atomically(Path::new("/"), |_| Ok(())).unwrap_err().code(), "io");
        assert_eq!(save_atomically(&folder.path().join("none/a"), |_| Ok(())).unwrap_err().code(), "io");
    }

    #[test]
    fn what_is_not_a_regular_file_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("none"), PathBuf::from("/dev/null")] {
            assert_eq!(PositionedFile::open(&path).unwrap_err().code(), "io");
        }
    }

    #[test]
    fn only_regular_files_of_the_extension_are_found_sorted() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.safetensors", "a.safetensors", "c.txt", "d.safetensors.tmp"] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        std::fs::create_dir(folder.path().join("e.safetensors")).unwrap();
        let found = files_with_extension(folder.path(), "safetensors").unwrap();
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect();
        assert_eq!(names, ["a.safetensors", "b.safetensors"]);
    }
}
