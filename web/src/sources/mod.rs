//! Where the page's files come from: files of the visitor, the browser's own file system, a server.
//!
//! What differs is how a file is found; what comes out is a [`Source`] like any other, that the engine streams from.

mod blob;
pub mod kept;
mod server;

use std::collections::BTreeMap;
use std::sync::Arc;

use ebbtide::weights::Source;
use ebbtide::{Error, Result};
use wasm_bindgen::{JsCast, JsValue};

use crate::http::HttpFile;
use blob::BlobFile;
use server::Browser;

/// Files under their names.
#[derive(Clone)]
pub enum Folder {
    /// All are known.
    Listed {
        /// For showing.
        name: String,
        /// By name.
        files: BTreeMap<String, Source>,
    },
    /// On a server, which is asked for each.
    Server {
        /// The folder's address, ending with `/`.
        url: String,
    },
}

impl Folder {
    /// The visitor's files: those of a folder, or single ones.
    pub fn of_files(files: &[web_sys::File]) -> Folder {
        let mut name = None;
        let mut listed = BTreeMap::new();
        for file in files {
            // `folder/sub/name` where a folder was chosen.
            let path = js_sys::Reflect::get(file, &"webkitRelativePath".into()).ok().and_then(|p| p.as_string());
            let path = path.filter(|p| !p.is_empty()).unwrap_or_else(|| file.name());
            let short = match path.split_once('/') {
                Some((folder, rest)) => {
                    name.get_or_insert_with(|| folder.to_string());
                    rest.to_string()
                }
                None => path,
            };
            let source = Source::waiting(Arc::new(BlobFile::new(short.clone(), file)));
            listed.insert(short, source);
        }
        let name = name.or_else(|| files.first().map(|f| f.name())).unwrap_or_default();
        Folder::Listed { name, files: listed }
    }

    /// A folder on a server, by its address or that of one of its files.
    pub fn of_url(url: &str) -> Result<Folder> {
        let invalid = |reason: &str| Error::Invalid { what: format!("the address `{url}`"), reason: reason.into() };
        let url = url.trim().split(['?', '#']).next().unwrap_or_default();
        if !url.starts_with("https://") && !url.starts_with("http://") {
            return Err(invalid("it has to begin with https://"));
        }
        let folder = match url.rsplit_once('/') {
            Some((folder, file)) if file.contains('.') && folder.len() > "https://".len() => folder,
            _ => url.trim_end_matches('/'),
        };
        Ok(Folder::Server { url: format!("{folder}/") })
    }

    /// For showing.
    pub fn name(&self) -> &str {
        match self {
            Folder::Listed { name, .. } => name,
            Folder::Server { url } => url.trim_end_matches('/').rsplit('/').next().unwrap_or(url),
        }
    }

    /// A file, if there is one of that name.
    pub async fn file(&self, name: &str) -> Result<Option<Source>> {
        match self {
            Folder::Listed { files, .. } => Ok(files.get(name).cloned()),
            Folder::Server { url } => HttpFile::open(Arc::new(Browser), &format!("{url}{name}")).await,
        }
    }

    /// Names of files that end so, sorted; none for a server, which has no list.
    pub fn ending(&self, end: &str) -> Vec<String> {
        match self {
            Folder::Listed { files, .. } => files.keys().filter(|n| n.ends_with(end)).cloned().collect(),
            Folder::Server { .. } => Vec::new(),
        }
    }
}

/// A file beside the page, as a whole: its bytes stay in the browser's store, where slices of it are read.
pub async fn beside_the_page(path: &str) -> Result<Source> {
    let blob = server::whole(path).await?;
    let name = path.rsplit('/').next().unwrap_or(path);
    Ok(Source::waiting(Arc::new(BlobFile::new(name.into(), &blob))))
}

/// What a thrown value says.
pub fn words(thrown: &JsValue) -> String {
    match thrown.dyn_ref::<js_sys::Error>() {
        Some(error) => format!("{}: {}", error.name(), error.message()),
        None => thrown.as_string().unwrap_or_else(|| format!("{thrown:?}")),
    }
}
