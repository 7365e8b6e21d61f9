//! The browser's own file system of this page (OPFS): copied models, kept sessions.
//!
//! Files are read and written by handles that work at once and copy straight between the file and a ring's chunk. A model's
//! copy is complete when its mark is written, last of all: what a closed tab left half copied is never taken for a model.

use std::collections::BTreeMap;
use std::sync::Arc;

use ebbtide::error::Bytes;
use ebbtide::rt::{ChunkMemory, Scratch, Sink, Waiting};
use ebbtide::weights::{Fetch, Source};
use ebbtide::{Error, Result};
use js_sys::{AsyncIterator, Reflect, Uint8Array};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{
    FileSystemDirectoryHandle, FileSystemFileHandle, FileSystemGetDirectoryOptions, FileSystemGetFileOptions,
    FileSystemReadWriteOptions, FileSystemRemoveOptions, FileSystemSyncAccessHandle, StorageManager,
};

use super::{Folder, words};

/// Bytes that are copied at once.
const CHUNK: u64 = 4 << 20;
/// The file that says that a copy is complete.
const MARK: &str = ".complete";

fn failed(what: &str) -> impl Fn(JsValue) -> Error + '_ {
    move |e| Error::Io { file: what.into(), reason: format!("the browser's file system refused: {}", words(&e)) }
}

async fn done<T: JsCast>(what: &str, promise: js_sys::Promise) -> Result<T> {
    JsFuture::from(promise).await.map(JsCast::unchecked_into).map_err(failed(what))
}

fn storage() -> Result<StorageManager> {
    let get = |of: &JsValue, name: &str| Reflect::get(of, &name.into()).ok().filter(|v| !v.is_undefined());
    let storage = get(&js_sys::global(), "navigator").and_then(|n| get(&n, "storage"));
    storage.map(JsCast::unchecked_into).ok_or_else(|| Error::Io {
        file: "the browser's file system".into(),
        reason: "this browser gives pages none, or not to pages opened this way".into(),
    })
}

/// Bytes that the page may still keep, as far as the browser tells.
pub async fn free_bytes() -> Option<u64> {
    let estimate = JsFuture::from(storage().ok()?.estimate().ok()?).await.ok()?;
    let number = |name: &str| Reflect::get(&estimate, &name.into()).ok()?.as_f64();
    Some((number("quota")? - number("usage")?).max(0.0) as u64)
}

/// A folder of the file system.
#[derive(Clone)]
pub struct Keep(FileSystemDirectoryHandle);

impl Keep {
    /// A folder below the root, by its path; made where it is not there yet.
    pub async fn open(path: &[&str]) -> Result<Keep> {
        let mut at: FileSystemDirectoryHandle = done("its root", storage()?.get_directory()).await?;
        let options = FileSystemGetDirectoryOptions::new();
        options.set_create(true);
        for name in path {
            at = done(name, at.get_directory_handle_with_options(name, &options)).await?;
        }
        Ok(Keep(at))
    }

    /// Names of what lies in it, sorted.
    pub async fn names(&self) -> Result<Vec<String>> {
        let keys = Reflect::get(&self.0, &"keys".into()).map_err(failed("a folder"))?;
        let keys: js_sys::Function = keys.unchecked_into();
        let iterator: AsyncIterator = keys.call0(&self.0).map_err(failed("a folder"))?.unchecked_into();
        let mut names = Vec::new();
        loop {
            let next: JsValue = done("a folder", iterator.next().map_err(failed("a folder"))?).await?;
            if Reflect::get(&next, &"done".into()).is_ok_and(|d| d.is_truthy()) {
                names.sort();
                return Ok(names);
            }
            names.extend(Reflect::get(&next, &"value".into()).ok().and_then(|v| v.as_string()));
        }
    }

    /// Deletes what has that name, with all that is in it. That nothing has it is no error.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let options = FileSystemRemoveOptions::new();
        options.set_recursive(true);
        match JsFuture::from(self.0.remove_entry_with_options(name, &options)).await {
            Err(e) if !words(&e).starts_with("NotFoundError") => Err(failed(name)(e)),
            _ => Ok(()),
        }
    }

    async fn handle(&self, name: &str, create: bool) -> Result<FileSystemSyncAccessHandle> {
        let options = FileSystemGetFileOptions::new();
        options.set_create(create);
        let file: FileSystemFileHandle = done(name, self.0.get_file_handle_with_options(name, &options)).await?;
        // In a window there are no such handles.
        if Reflect::get(&file, &"createSyncAccessHandle".into()).is_ok_and(|f| f.is_undefined()) {
            let reason = "its files can be opened in a worker only".into();
            return Err(Error::Io { file: name.into(), reason });
        }
        done(name, file.create_sync_access_handle()).await
    }

    /// Writes a file whole: under another name first, so that one cut short by a closed tab is never read.
    pub async fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let part = format!("{name}.part");
        let handle = Open { handle: self.handle(&part, true).await?, name: part.clone(), len: 0 };
        handle.truncate(0)?;
        handle.write_slice(bytes)?;
        handle.flush()?;
        drop(handle);
        let options = FileSystemGetFileOptions::new();
        let file: JsValue = done(&part, self.0.get_file_handle_with_options(&part, &options)).await?;
        let rename: js_sys::Function =
            Reflect::get(&file, &"move".into()).map_err(failed(&part))?.dyn_into().map_err(failed(&part))?;
        let moved = rename.call1(&file, &name.into()).map_err(failed(name))?;
        done::<JsValue>(name, moved.unchecked_into()).await.map(|_| ())
    }

    /// A file, open for reading as long as the source is held. `None` if there is none.
    pub async fn file(&self, name: &str) -> Result<Option<Source>> {
        if !self.names().await?.iter().any(|n| n == name) {
            return Ok(None);
        }
        let handle = self.handle(name, false).await?;
        let len = handle.get_size().map_err(failed(name))? as u64;
        Ok(Some(Source::waiting(Arc::new(Open { handle, name: name.into(), len }))))
    }

    /// A small file, whole.
    pub async fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(source) = self.file(name).await? else { return Ok(None) };
        let mut bytes = vec![0; source.len() as usize];
        source.fill(0, &mut bytes).await?;
        Ok(Some(bytes))
    }
}

/// An open file.
struct Open {
    handle: FileSystemSyncAccessHandle,
    name: String,
    len: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.handle.close();
    }
}

impl Open {
    fn truncate(&self, len: u64) -> Result<()> {
        self.handle.truncate_with_f64(len as f64).map_err(failed(&self.name))
    }

    fn flush(&self) -> Result<()> {
        self.handle.flush().map_err(failed(&self.name))
    }

    fn write_slice(&self, bytes: &[u8]) -> Result<()> {
        let n = self.handle.write_with_u8_array(bytes).map_err(failed(&self.name))?;
        self.whole(n, bytes.len())
    }

    fn write_host(&self, at: u64, bytes: &Uint8Array) -> Result<()> {
        let options = FileSystemReadWriteOptions::new();
        options.set_at(at as f64);
        let n = self.handle.write_with_buffer_source_and_options(bytes, &options).map_err(failed(&self.name))?;
        self.whole(n, bytes.length() as usize)
    }

    fn whole(&self, done: f64, len: usize) -> Result<()> {
        if done == len as f64 {
            return Ok(());
        }
        let reason = format!("{done} of {len} bytes went through: there is no room left, or the file is shorter now");
        Err(Error::Io { file: self.name.clone(), reason })
    }

    fn read(&self, offset: u64, sink: Sink<'_>) -> Result<()> {
        let options = FileSystemReadWriteOptions::new();
        options.set_at(offset as f64);
        if let Some(bytes) = sink.host() {
            let n = self.handle.read_with_buffer_source_and_options(bytes, &options).map_err(failed(&self.name))?;
            return self.whole(n, bytes.length() as usize);
        }
        sink.by_pieces(|at, piece| {
            options.set_at((offset + at as u64) as f64);
            let n = self.handle.read_with_u8_array_and_options(piece, &options).map_err(failed(&self.name))?;
            self.whole(n, piece.len())
        })
    }
}

impl Fetch for Open {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn fetch<'a>(&'a self, offset: u64, sink: Sink<'a>) -> Waiting<'a, Result<()>> {
        Box::pin(std::future::ready(self.read(offset, sink)))
    }
}

/// A name that a file may have here.
pub fn check_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_. ".contains(c);
    if (1..=64).contains(&name.len()) && name.chars().all(fits) && !name.starts_with(['.', ' ']) && !name.ends_with('.')
    {
        return Ok(());
    }
    let reason = "letters, digits, `-`, `_`, `.` and spaces are possible, at most 64".into();
    Err(Error::Invalid { what: format!("the name `{name}`"), reason })
}

/// Copies files into a folder under `models`, in place of what it held, and opens the copy. `said` is told the file, the bytes
/// done and those in all; an error from it ends the copying.
pub async fn copy_model(
    name: &str,
    files: &BTreeMap<String, Source>,
    said: &mut dyn FnMut(&str, u64, u64) -> Result<()>,
) -> Result<Folder> {
    check_name(name)?;
    let all: u64 = files.values().map(Source::len).sum();
    if let Some(free) = free_bytes().await
        && free < all
    {
        let what = format!("a copy of {name}");
        let reason = format!("it takes {}, and the browser has room for {}", Bytes(all), Bytes(free));
        return Err(Error::Invalid { what, reason });
    }
    Keep::open(&[MODELS]).await?.delete(name).await?;
    let folder = Keep::open(&[MODELS, name]).await?;
    let Some(chunk) = Scratch::new(CHUNK.min(all.max(1)))? else {
        return Err(Error::Io { file: name.into(), reason: "there is no memory of the browser".into() });
    };
    let mut chunk = ChunkMemory::Scratch(chunk);
    let mut bytes = 0;
    for (file, source) in files {
        // A shard's name may hold folders; here it is one name.
        let handle = Open { handle: folder.handle(&flat(file), true).await?, name: file.clone(), len: 0 };
        handle.truncate(source.len())?;
        let mut at = 0;
        while at < source.len() {
            said(file, bytes, all)?;
            let n = CHUNK.min(source.len() - at);
            source.fill_sink(at, chunk.sink(0..n as usize)).await?;
            if let Some(host) = chunk.sink(0..n as usize).host() {
                handle.write_host(at, host)?;
            }
            (at, bytes) = (at + n, bytes + n);
        }
        handle.flush()?;
    }
    let sizes: BTreeMap<&String, u64> = files.iter().map(|(name, source)| (name, source.len())).collect();
    let mark = serde_json::to_vec(&sizes).unwrap_or_default();
    folder.write(MARK, &mark).await?;
    said("", all, all)?;
    open_model(name).await
}

const MODELS: &str = "models";

/// The complete copies and their bytes.
pub async fn models() -> Result<Vec<(String, u64)>> {
    let mut models = Vec::new();
    for name in Keep::open(&[MODELS]).await?.names().await? {
        // What was never copied to the end is none.
        if let Ok(sizes) = sizes(&name).await {
            models.push((name, sizes.values().sum()));
        }
    }
    Ok(models)
}

/// Deletes a copy.
pub async fn delete_model(name: &str) -> Result<()> {
    check_name(name)?;
    Keep::open(&[MODELS]).await?.delete(name).await
}

/// The files of a complete copy.
async fn sizes(name: &str) -> Result<BTreeMap<String, u64>> {
    check_name(name)?;
    let not_found = || Error::NotFound {
        what: "kept model",
        name: name.into(),
        hint: Some("it was never copied to the end; open it where it comes from and copy it".into()),
    };
    let mark = Keep::open(&[MODELS, name]).await?.read(MARK).await?.ok_or_else(not_found)?;
    serde_json::from_slice(&mark).map_err(|_| not_found())
}

/// Opens a complete copy.
pub async fn open_model(name: &str) -> Result<Folder> {
    let folder = Keep::open(&[MODELS, name]).await?;
    let mut files = BTreeMap::new();
    for (file, len) in sizes(name).await? {
        let changed =
            || Error::SourceChanged { file: file.clone(), reason: format!("the copy of {name} had {len} bytes") };
        let source = folder.file(&flat(&file)).await?.filter(|s| s.len() == len).ok_or_else(changed)?;
        files.insert(file, source);
    }
    Ok(Folder::Listed { name: name.into(), files })
}

fn flat(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2F")
}
