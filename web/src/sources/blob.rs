//! A file of the browser, read by slices: the visitor's own, or one in the browser's store.

use ebbtide::rt::{Sink, Waiting};
use ebbtide::weights::Fetch;
use ebbtide::{Error, Result};
use js_sys::Uint8Array;
use wasm_bindgen::JsCast;
use wasm_bindgen_futures::JsFuture;
use web_sys::{Blob, DomException};

use super::words;

/// A blob under a name.
pub struct BlobFile {
    name: String,
    blob: Blob,
}

impl BlobFile {
    /// Takes a blob (a `File` is one).
    pub fn new(name: String, blob: &Blob) -> BlobFile {
        BlobFile { name, blob: blob.clone() }
    }

    async fn read(&self, offset: u64, mut sink: Sink<'_>) -> Result<()> {
        let len = sink.len();
        let io = |reason: String| Error::Io { file: self.name.clone(), reason };
        // A blob is at most 2⁵³ bytes long: f64 holds every offset.
        let slice = self.blob.slice_with_f64_and_f64(offset as f64, (offset + len as u64) as f64);
        let slice = slice.map_err(|e| io(words(&e)))?;
        let bytes = JsFuture::from(slice.array_buffer()).await.map_err(|e| {
            // What the browser says of a file that is no longer as it was when the visitor chose it.
            match e.dyn_ref::<DomException>().map(|e| e.name()) {
                Some(name) if name == "NotReadableError" || name == "NotFoundError" => {
                    Error::SourceChanged { file: self.name.clone(), reason: words(&e) }
                }
                _ => io(words(&e)),
            }
        })?;
        let bytes = Uint8Array::new(&bytes);
        if bytes.length() as usize != len {
            return Err(io(format!("{len} bytes at byte {offset} were asked for, {} came", bytes.length())));
        }
        sink.put_host(0, &bytes);
        Ok(())
    }
}

impl Fetch for BlobFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.blob.size() as u64
    }

    fn fetch<'a>(&'a self, offset: u64, sink: Sink<'a>) -> Waiting<'a, Result<()>> {
        Box::pin(self.read(offset, sink))
    }
}
