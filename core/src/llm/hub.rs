//! Where a model's files lie: a folder, or a name looked up in the hub's local cache.
//!
//! Looking a name up never touches the network: what is not on the disk is an error that says how to get it. A name is
//! checked as text before it becomes a path, so that `--model ../../x/y` is no way around the cache, and what a file of
//! the cache says (the commit in `refs/main`) is checked the same way.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::rt::file::{is_file, is_folder};
use crate::weights::Source;
use crate::weights::safetensors::format_error;

/// Where the cache lies: the environment's variables, as plain data, so that tests and the page can state their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubEnvironment {
    /// `HF_HUB_CACHE` (or the older `HUGGINGFACE_HUB_CACHE`): the cache itself.
    pub cache: Option<PathBuf>,
    /// `HF_HOME`: its `hub` is the cache.
    pub home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: its `huggingface/hub` is the cache.
    pub xdg: Option<PathBuf>,
    /// The user's folder: its `.cache/huggingface/hub` is the cache.
    pub user: Option<PathBuf>,
}

impl HubEnvironment {
    /// The process's own variables. Empty ones count as not set.
    pub fn from_env() -> HubEnvironment {
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        HubEnvironment {
            cache: path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")),
            home: path("HF_HOME"),
            xdg: path("XDG_CACHE_HOME"),
            user: path("HOME").or_else(|| path("USERPROFILE")),
        }
    }

    /// The cache's folder: the first of the variables that is set decides, as it does for the hub's own tools.
    pub fn folder(&self) -> Option<PathBuf> {
        let home = |path: &PathBuf| path.join("hub");
        let below = |path: PathBuf| path.join("huggingface").join("hub");
        self.cache
            .clone()
            .or_else(|| self.home.as_ref().map(home))
            .or_else(|| self.xdg.clone().map(below))
            .or_else(|| self.user.as_ref().map(|path| below(path.join(".cache"))))
    }
}

/// The folder of `model`: itself if it is a folder, else the snapshot of `org/name` in the hub's local cache.
///
/// Errors: [`Error::NotFound`] if there is neither, with where was looked; [`Error::Invalid`] if `model` is a file or
/// can be no name; [`Error::Format`] if the cache's `refs/main` is not what it should be.
pub async fn find_model(model: &str, environment: &HubEnvironment) -> Result<PathBuf> {
    let path = Path::new(model);
    match is_folder(path) {
        Ok(true) if !model.is_empty() => return Ok(path.to_owned()),
        Ok(false) => return Err(invalid(model, "is a file: name the folder that holds it")),
        _ => {}
    }
    check_name(model)?;
    let Some(cache) = environment.folder() else {
        let hint = "no such folder, and none of HF_HUB_CACHE, HF_HOME and HOME says where the hub's cache is".into();
        return Err(not_found(model, hint));
    };
    let repository = cache.join(format!("models--{}", model.replace('/', "--")));
    let reference = repository.join("refs").join("main");
    if !is_file(&reference) {
        let hint = format!(
            "no such folder, and the local hub cache {} does not hold it; ebbtide never downloads: `hf download {model}` does",
            cache.display()
        );
        return Err(not_found(model, hint));
    }
    let source = Source::open(&reference)?;
    let text = read_small(&source, 256).await?;
    let commit = String::from_utf8_lossy(&text).trim().to_owned();
    if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(format_error(source.name(), None, format!("{commit:?} is not the name of a snapshot")));
    }
    let snapshot = repository.join("snapshots").join(&commit);
    match is_folder(&snapshot) {
        Ok(true) => Ok(snapshot),
        _ => {
            let hint = format!(
                "the local hub cache {} names its snapshot {commit}, which is not there; `hf download {model}` brings it back",
                cache.display()
            );
            Err(not_found(model, hint))
        }
    }
}

/// Whether `model` can be `org/name` (or the hub's older plain `name`), by the hub's rules for names.
fn check_name(model: &str) -> Result<()> {
    let parts: Vec<&str> = model.split('/').collect();
    let fits = |part: &&str| {
        (1..=96).contains(&part.len())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            && !part.contains("--")
            && !part.contains("..")
    };
    if parts.len() <= 2 && parts.iter().all(fits) {
        return Ok(());
    }
    Err(invalid(model, "is no folder and can be no name of the hub: expected a folder or `org/name`"))
}

fn invalid(model: &str, reason: &str) -> Error {
    Error::Invalid { what: "--model".into(), reason: format!("{model:?} {reason}") }
}

fn not_found(model: &str, hint: String) -> Error {
    Error::NotFound { what: "model", name: model.into(), hint: Some(hint) }
}

/// A small file (a configuration, a tokenizer) as a whole, if it has at most `most` bytes.
///
/// Errors: [`Error::Format`] if it is larger; what [`Source::fill`] returns.
pub async fn read_small(source: &Source, most: u64) -> Result<Vec<u8>> {
    if source.len() > most {
        let reason = format!("it has {} bytes, above the limit of {most} for such a file", source.len());
        return Err(format_error(source.name(), None, reason));
    }
    // At most `most`, which callers choose small.
    let mut text = vec![0; usize::try_from(source.len()).unwrap_or(0)];
    source.fill(0, &mut text).await?;
    Ok(text)
}

/// The source of `name` in `folder`, if there is such a file.
pub fn optional_file(folder: &Path, name: &str) -> Result<Option<Source>> {
    let path = folder.join(name);
    if is_file(&path) { Source::open(path).map(Some) } else { Ok(None) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    fn find(model: &str, environment: &HubEnvironment) -> Result<PathBuf> {
        pollster::block_on(find_model(model, environment))
    }

    fn cache_with(reference: &str, snapshot: &str) -> (tempfile::TempDir, HubEnvironment) {
        let folder = tempfile::tempdir().unwrap();
        let repository = folder.path().join("hub/models--org--tiny.model");
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        std::fs::create_dir_all(repository.join("snapshots").join(snapshot)).unwrap();
        std::fs::write(repository.join("refs/main"), reference).unwrap();
        let environment = HubEnvironment { home: Some(folder.path().to_owned()), ..HubEnvironment::default() };
        (folder, environment)
    }

    #[test]
    fn a_folder_is_taken_as_it_is_and_a_name_from_the_local_cache() {
        let (folder, environment) = cache_with("abc123\n", "abc123");
        let path = folder.path().to_str().unwrap();
        assert_eq!(find(path, &environment).unwrap(), folder.path());
        let found = find("org/tiny.model", &environment).unwrap();
        assert_eq!(found, folder.path().join("hub/models--org--tiny.model/snapshots/abc123"));
    }

    #[test]
    fn the_variables_decide_in_the_order_of_the_hubs_own_tools() {
        let mut e = HubEnvironment {
            cache: Some("c".into()),
            home: Some("h".into()),
            xdg: Some("x".into()),
            user: Some("u".into()),
        };
        assert_eq!(e.folder().unwrap(), Path::new("c"));
        e.cache = None;
        assert_eq!(e.folder().unwrap(), Path::new("h/hub"));
        e.home = None;
        assert_eq!(e.folder().unwrap(), Path::new("x/huggingface/hub"));
        e.xdg = None;
        assert_eq!(e.folder().unwrap(), Path::new("u/.cache/huggingface/hub"));
        e.user = None;
        assert_eq!(e.folder(), None);
    }

    #[test]
    fn what_is_not_there_is_refused_with_where_was_looked() {
        let (_folder, environment) = cache_with("abc123", "other");
        let gone = find("org/tiny.model", &environment).unwrap_err();
        assert!(gone.code() == "not-found" && gone.to_string().contains("abc123"), "{gone}");
        let never = find("org/another", &environment).unwrap_err();
        assert!(never.to_string().contains("hf download org/another"), "{never}");
        assert_eq!(find("org/another", &HubEnvironment::default()).unwrap_err().code(), "not-found");
    }

    #[test]
    fn names_that_lead_out_of_the_cache_are_refused() {
        let (_folder, environment) = cache_with("abc123", "abc123");
        for name in ["", "../none/x", "a/b/c", "org/..", ".hidden/x", "a--b/c", "/none/x", "org/na me", "a\0/b", "org/"]
        {
            assert_eq!(find(name, &environment).unwrap_err().code(), "invalid", "{name:?}");
        }
    }

    #[test]
    fn a_reference_that_leads_out_of_the_cache_is_refused() {
        for reference in ["", "../../..", "a/b", &"a".repeat(300)] {
            let (_folder, environment) = cache_with(reference, "abc123");
            assert_eq!(find("org/tiny.model", &environment).unwrap_err().code(), "format", "{reference:?}");
        }
    }
}
