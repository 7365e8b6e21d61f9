//! Making a catalog: from a folder, an index, a file, or sources, each header checked before anything is listed.

use crate::error::{Error, Result};
use crate::rt::file;
use crate::weights::catalog::{Catalog, CatalogFile, Hit, Weight, WeightId};
use crate::weights::dtype::DType;
use crate::weights::index::{INDEX_FILE, Index};
use crate::weights::piece::cut;
use crate::weights::safetensors::Header;
use crate::weights::source::{Identity, Source};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// The largest file: 64 TiB. A sparse file may claim to be any size, and pieces are counted by it.
const MAX_SOURCE_BYTES: u64 = 1 << 46;

impl Catalog {
    /// Opens a model: one `.safetensors` file; a folder with `model.safetensors.index.json` and its shards; an index by
    /// its path; or a folder with `.safetensors` files, taken in the order of their names.
    ///
    /// Each file becomes a segment named by its file stem. Errors: [`Error::Io`], [`Error::Format`] for any file or index
    /// that is not as the format promises, [`Error::NotFound`] for a folder without such files, [`Error::Limit`] for a
    /// tensor with a row above 128 MiB or a file above 64 TiB, [`Error::Invalid`] for two files of one stem.
    pub async fn open(path: impl AsRef<Path>) -> Result<Catalog> {
        let path = path.as_ref();
        if file::is_folder(path)? {
            let index = path.join(INDEX_FILE);
            if file::is_file(&index) {
                return Catalog::open_index(path, &index).await;
            }
            let files = file::files_with_extension(path, "safetensors")?;
            if files.is_empty() {
                return Err(Error::NotFound {
                    what: "safetensors file",
                    name: path.display().to_string(),
                    hint: Some(format!("the folder needs `{INDEX_FILE}` or files ending in `.safetensors`")),
                });
            }
            let sources = files.iter().map(Source::open).collect::<Result<Vec<Source>>>()?;
            return Catalog::from_sources(sources).await;
        }
        if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with(".safetensors.index.json")) {
            let folder = path.parent().unwrap_or(Path::new(""));
            return Catalog::open_index(folder, path).await;
        }
        Catalog::from_sources(vec![Source::open(path)?]).await
    }

    /// A catalog of these files, in this order; one that is given twice counts once.
    ///
    /// Errors: as for [`Catalog::open`].
    pub async fn from_sources(sources: Vec<Source>) -> Result<Catalog> {
        let files = sources.into_iter().map(|source| (source, None)).collect();
        Catalog::build(files, None).await
    }

    /// A catalog of an index and its shards, each under the name that the index gives it.
    ///
    /// Errors: as for [`Catalog::open`]; [`Error::NotFound`] for a shard that is not given.
    pub async fn from_index(index: &Index, mut shards: BTreeMap<String, Source>) -> Result<Catalog> {
        let mut files = Vec::new();
        for name in index.shards() {
            let (name, source) = shards.remove_entry(name).ok_or_else(|| Error::NotFound {
                what: "shard",
                name: name.into(),
                hint: Some("the index names it; fetch it as well".into()),
            })?;
            files.push((source, Some(name)));
        }
        Catalog::build(files, Some(index)).await
    }

    async fn open_index(folder: &Path, index_path: &Path) -> Result<Catalog> {
        let index = Index::read(&Source::open(index_path)?).await?;
        let mut shards = BTreeMap::new();
        for name in index.shards() {
            let path = folder.join(name);
            let source = Source::open(&path).map_err(|e| match e {
                Error::Io { file, reason } => {
                    Error::Io { file, reason: format!("{reason}; `{}` names it as a shard", index_path.display()) }
                }
                other => other,
            })?;
            shards.insert(name.to_owned(), source);
        }
        Catalog::from_index(&index, shards).await
    }

    async fn build(files: Vec<(Source, Option<String>)>, index: Option<&Index>) -> Result<Catalog> {
        let mut catalog = Catalog {
            sources: Vec::new(),
            files: Vec::new(),
            weights: Vec::new(),
            names: BTreeMap::new(),
            segments: Vec::new(),
            current: BTreeMap::new(),
            defaults: HashSet::new(),
        };
        let mut known: HashMap<Identity, usize> = HashMap::new();
        let mut headers: Vec<Arc<Header>> = Vec::new();
        let mut ids: Vec<Vec<Option<WeightId>>> = Vec::new();
        let mut shard_names: Vec<Option<String>> = Vec::new();
        for (source, shard) in files {
            let stem: Arc<str> = shard.as_deref().map_or_else(|| source.stem(), stem_of_shard).into();
            let index = match known.get(&source.identity()) {
                Some(index) => *index,
                None => {
                    let header = Arc::new(Header::read(&source).await?);
                    known.insert(source.identity(), headers.len());
                    ids.push(catalog.add_weights(&source, &header)?);
                    headers.push(header);
                    catalog.sources.push(source.clone());
                    headers.len() - 1
                }
            };
            if let Some(other) = catalog.files.iter().find(|f| f.stem == stem) {
                if other.source == index {
                    continue;
                }
                let reason = format!(
                    "both `{}` and `{}` would be the segment `{stem}`; rename one",
                    catalog.sources[other.source].name(),
                    source.name()
                );
                return Err(Error::Invalid { what: "files".into(), reason });
            }
            catalog.files.push(CatalogFile { stem, source: index, header: Arc::clone(&headers[index]) });
            shard_names.push(shard);
        }
        if let Some(index) = index {
            let by_name = shard_names.iter().zip(&catalog.files);
            let by_name = by_name.filter_map(|(name, file)| Some((name.as_deref()?, &*file.header))).collect();
            index.check(&by_name)?;
        }
        for (file, shard) in shard_names.iter().enumerate() {
            catalog.add_names_and_segment(file, &ids, |tensor| {
                let home = index.and_then(|i| i.shard(tensor));
                home.is_none() || home == shard.as_deref()
            });
        }
        Ok(catalog)
    }

    fn add_weights(&mut self, source: &Source, header: &Header) -> Result<Vec<Option<WeightId>>> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::Limit { what: source.name().into(), need: source.len(), have: MAX_SOURCE_BYTES });
        }
        let mut ids = Vec::with_capacity(header.tensors.len());
        // Only tensors without bytes can share a range within a file; the header's check refuses all others.
        let mut empty: HashMap<(u64, DType, &[u64]), WeightId> = HashMap::new();
        for tensor in &header.tensors {
            let Some(dtype) = tensor.dtype.weight() else {
                ids.push(None);
                continue;
            };
            let key = (tensor.range.start, dtype, tensor.shape.as_slice());
            if tensor.range.is_empty()
                && let Some(id) = empty.get(&key)
            {
                self.weights[id.0 as usize].names.push(Arc::clone(&tensor.name));
                ids.push(Some(*id));
                continue;
            }
            let id = WeightId(u32::try_from(self.weights.len()).map_err(|_| too_many(source.name()))?);
            if tensor.range.is_empty() {
                empty.insert(key, id);
            }
            self.weights.push(Weight {
                names: vec![Arc::clone(&tensor.name)],
                dtype,
                shape: tensor.shape.clone(),
                source: self.sources.len(),
                range: tensor.range.clone(),
                pieces: cut(&tensor.name, &tensor.shape, &tensor.range)?,
            });
            ids.push(Some(id));
        }
        Ok(ids)
    }

    /// Lists the tensors of a file by name, as far as `at_home` says that the name means the one in this file, and makes
    /// the file's segment.
    fn add_names_and_segment(&mut self, file: usize, ids: &[Vec<Option<WeightId>>], at_home: impl Fn(&str) -> bool) {
        let CatalogFile { stem, source, header } = self.files[file].clone();
        let (mut entries, mut left_out) = (Vec::new(), Vec::new());
        for (tensor, weight) in header.tensors.iter().zip(&ids[source]) {
            if at_home(&tensor.name) {
                let hit = Hit { file, weight: *weight, dtype: tensor.dtype };
                self.names.entry(Arc::clone(&tensor.name)).or_default().push(hit);
            }
            match *weight {
                Some(weight) => entries.extend(self.all_pieces(&tensor.name, weight)),
                None => left_out.push((Arc::clone(&tensor.name), tensor.dtype)),
            }
        }
        let id = self.push_segment(stem, entries, left_out.into());
        self.defaults.insert(id);
    }
}

/// The segment of a shard: its path in the index without the extension, as two sub-folders may hold equal file names.
fn stem_of_shard(name: &str) -> &str {
    name.strip_suffix(".safetensors").filter(|stem| !stem.is_empty()).unwrap_or(name)
}

fn too_many(file: &str) -> Error {
    Error::Format { file: file.into(), tensor: None, reason: "there are more tensors than can be numbered".into() }
}
