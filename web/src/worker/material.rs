//! What a training is made of: a model with its tokenizer, and rows of text.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::data::{Batches, DataOptions, Dataset, Encoder, Order};
use ebbtide::llm::hub::read_small;
use ebbtide::llm::models::Model;
use ebbtide::llm::run::RunData;
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide::weights::Source;
use ebbtide::weights::index::{INDEX_FILE, Index};
use ebbtide::{Catalog, Error, Result};

use super::Bench;
use crate::protocol::{
    DataFrom, DataInfo, DataSettings, KeptModel, ModelFrom, ModelInfo, Progress, Reply, RunSettings,
};
use crate::sources::{Folder, beside_the_page, kept};

/// The tiny model beside the page.
const EMBEDDED: &str = "tiny-shakespeare-llama";
/// Files of a model that are read whole.
const SMALL: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];
/// The most bytes of one.
const SMALL_BYTES: u64 = 64 << 20;
/// Rows are cut after so many tokens.
const MAX_SEQ_LENGTH: u64 = 256;
/// The most bytes of training data that are kept with a session.
const MOST_DATA: u64 = 256 << 20;

/// A model that is open.
pub(crate) struct Material {
    pub model: Model,
    pub tokenizer: Arc<Tokenizer>,
    pub from: ModelFrom,
    pub name: String,
    /// All its files, for copying.
    files: BTreeMap<String, Source>,
}

/// Training data that is open.
pub(crate) struct Data {
    pub train: Dataset,
    pub valid: Option<Dataset>,
    pub info: DataInfo,
    /// For keeping: the rows of both, and how they were read.
    pub sources: (Source, Option<Source>),
    pub settings: DataSettings,
}

impl Material {
    async fn open(folder: &Folder, from: ModelFrom) -> Result<Material> {
        let mut files = BTreeMap::new();
        let mut texts = BTreeMap::new();
        for name in SMALL {
            if let Some(source) = folder.file(name).await? {
                texts.insert(name, (source.name().to_string(), read_small(&source, SMALL_BYTES).await?));
                files.insert(name.to_string(), source);
            }
        }
        let needed = |name: &'static str| {
            texts.get(name).ok_or_else(|| Error::NotFound {
                what: "file",
                name: name.into(),
                hint: Some(format!("{} is no model's folder as the Hugging Face hub lays it out", folder.name())),
            })
        };
        let (file, text) = needed("config.json")?;
        let mut config = ModelConfig::parse(file, text)?;
        if let Some((file, text)) = texts.get("generation_config.json") {
            config.add_end_tokens(file, text)?;
        }
        let (file, text) = needed("tokenizer.json")?;
        let settings = texts.get("tokenizer_config.json").map(|(file, text)| (file.as_str(), text.as_slice()));
        let tokenizer = Tokenizer::parse(file, text, settings)?;
        let catalog = match folder.file(INDEX_FILE).await? {
            Some(source) => {
                let index = Index::read(&source).await?;
                let mut shards = BTreeMap::new();
                for name in index.shards() {
                    if let Some(shard) = folder.file(name).await? {
                        files.insert(name.to_string(), shard.clone());
                        shards.insert(name.to_string(), shard);
                    }
                }
                files.insert(INDEX_FILE.into(), source);
                Catalog::from_index(&index, shards).await?
            }
            None => {
                let mut names = folder.ending(".safetensors");
                if names.is_empty() {
                    names.push("model.safetensors".into());
                }
                let mut sources = Vec::new();
                for name in names {
                    let source = folder.file(&name).await?.ok_or_else(|| Error::NotFound {
                        what: "file",
                        name: name.clone(),
                        hint: Some(format!("{} has neither weights nor an index of them", folder.name())),
                    })?;
                    files.insert(name, source.clone());
                    sources.push(source);
                }
                Catalog::from_sources(sources).await?
            }
        };
        let model = Model::new(config, catalog)?;
        Ok(Material { model, tokenizer: Arc::new(tokenizer), from, name: folder.name().into(), files })
    }

    /// Whether training may read from where it is.
    pub fn trainable(&self) -> bool {
        // A row of the embedding would be a request of its own.
        !matches!(self.from, ModelFrom::Url { .. })
    }

    pub async fn info(&self) -> ModelInfo {
        let (config, catalog) = (self.model.config(), self.model.catalog());
        ModelInfo {
            name: self.name.clone(),
            architecture: config.family.architecture().into(),
            parameters: catalog.weights().iter().map(|w| w.shape.iter().product::<u64>()).sum(),
            weight_bytes: catalog.weights().iter().map(|w| w.bytes()).sum(),
            file_bytes: self.files.values().map(Source::len).sum(),
            blocks: config.layers,
            hidden: config.hidden,
            vocabulary: config.vocabulary,
            max_positions: config.max_positions,
            linear_layers: self.model.linear_layers().into_iter().map(String::from).collect(),
            trainable: self.trainable(),
            free_bytes: kept::free_bytes().await,
            notes: config.notes.clone(),
        }
    }
}

impl Data {
    /// The rows as a run takes them.
    pub fn for_run(&self, run: &RunSettings) -> Result<RunData> {
        let seed = run.seed.unwrap_or(0).into();
        let order = if run.in_order == Some(true) { Order::File } else { Order::Shuffled { seed } };
        let rows = run.batch_size.unwrap_or(4);
        let accumulation = run.grad_accumulation_steps.unwrap_or(1);
        let train = Batches::new(self.train.clone(), order, rows, accumulation)?;
        let valid = self.valid.clone().map(|v| Batches::new(v, Order::File, rows, 1)).transpose()?;
        Ok(RunData { train, valid })
    }

    pub async fn open(
        material: &Material,
        name: String,
        sources: (Source, Option<Source>),
        settings: &DataSettings,
    ) -> Result<Data> {
        let most = material.model.config().max_positions;
        let max_tokens = settings.max_seq_length.unwrap_or(MAX_SEQ_LENGTH).min(most);
        let options = DataOptions { mask_prompt: settings.mask_prompt == Some(true), max_tokens };
        let encoder = Encoder::of_model(material.tokenizer.clone(), material.model.config(), options)?;
        let encoder = Arc::new(encoder);
        let train = Dataset::scan(sources.0.clone(), encoder.clone()).await?;
        let valid = match &sources.1 {
            Some(source) => Some(Dataset::scan(source.clone(), encoder).await?),
            None => None,
        };
        let stats = train.stats();
        let mut notes = stats.notes(max_tokens);
        if let Some(valid) = &valid {
            notes.extend(valid.stats().notes(max_tokens).into_iter().map(|n| format!("validation: {n}")));
        }
        let info = DataInfo {
            name,
            rows: train.len() as u64,
            validation_rows: valid.as_ref().map_or(0, |v| v.len() as u64),
            tokens: stats.tokens,
            longest: stats.longest,
            trained_tokens: stats.trained,
            notes,
        };
        Ok(Data { train, valid, info, sources, settings: settings.clone() })
    }
}

/// Rows of a text that somebody typed: its paragraphs, or its lines where it has only one paragraph.
fn typed(text: &str) -> String {
    let text = text.replace("\r\n", "\n");
    let paragraphs: Vec<&str> = text.split("\n\n").map(str::trim).filter(|p| !p.is_empty()).collect();
    let rows = if paragraphs.len() > 1 { paragraphs } else { text.lines().map(str::trim).collect() };
    let rows = rows.into_iter().filter(|row| !row.is_empty());
    rows.map(|row| format!("{}\n", serde_json::json!({ "text": row }))).collect()
}

/// A whole file in memory, to be scanned and kept.
async fn in_memory(name: &str, source: &Source) -> Result<Source> {
    let bytes = read_small(source, MOST_DATA).await?;
    let bytes = if name.ends_with(".jsonl") {
        bytes
    } else {
        let text = String::from_utf8(bytes).map_err(|_| Error::Format {
            file: name.into(),
            tensor: None,
            reason: "it is neither rows (.jsonl) nor a text in UTF-8".into(),
        })?;
        typed(&text).into_bytes()
    };
    Ok(Source::memory(name, bytes))
}

impl Bench {
    pub async fn open(&self, id: u32, from: &ModelFrom, files: &[web_sys::File]) -> Result<Reply> {
        self.phase(id, "reading the model's headers");
        // What is open goes first: a kept file can be open only once. Its data and adapter are another model's.
        self.close();
        let material = Rc::new(self.find(from, files).await?);
        *self.model.borrow_mut() = Some(material.clone());
        Ok(Reply::Model { model: material.info().await })
    }

    fn close(&self) {
        *self.model.borrow_mut() = None;
        *self.data.borrow_mut() = None;
        *self.trained.borrow_mut() = None;
        self.all_bytes.borrow_mut().clear();
    }

    async fn find(&self, from: &ModelFrom, files: &[web_sys::File]) -> Result<Material> {
        let folder = match from {
            ModelFrom::Embedded => {
                let mut listed = BTreeMap::new();
                for name in SMALL.into_iter().chain(["model.safetensors"]) {
                    listed.insert(name.to_string(), beside_the_page(&format!("model/{name}")).await?);
                }
                Folder::Listed { name: EMBEDDED.into(), files: listed }
            }
            ModelFrom::Files => Folder::of_files(files),
            ModelFrom::Url { url } => Folder::of_url(url)?,
            ModelFrom::Kept { name } => kept::open_model(name).await?,
        };
        Material::open(&folder, from.clone()).await
    }

    /// Opens a model in place of the one that is open, unless that is the one.
    pub async fn open_unless_open(&self, id: u32, from: &ModelFrom, fingerprint: &str) -> Result<Rc<Material>> {
        let same = |m: &Material| format!("{:016x}", m.model.catalog().fingerprint()) == fingerprint;
        if let Some(open) = self.model.borrow().clone().filter(|m| same(m)) {
            return Ok(open);
        }
        if !matches!(from, ModelFrom::Embedded | ModelFrom::Kept { .. }) {
            let hint = "the session's model lies outside of the browser: open its files, then the session again".into();
            return Err(Error::NotFound { what: "model", name: "of the session".into(), hint: Some(hint) });
        }
        self.open(id, from, &[]).await?;
        let open = self.model()?;
        if same(&open) {
            return Ok(open);
        }
        let reason = "the session was made with another model of this name".into();
        Err(Error::SourceChanged { file: open.name.clone(), reason })
    }

    pub async fn copy(&self, id: u32) -> Result<Reply> {
        let material = self.model()?;
        if let ModelFrom::Kept { .. } = material.from {
            return Ok(Reply::Model { model: material.info().await });
        }
        let name: String = material
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' })
            .collect();
        let name = name.trim_start_matches('.').trim_end_matches('.').chars().take(64).collect::<String>();
        let cancel = self.cancel();
        let mut said = |file: &str, bytes: u64, of: u64| {
            self.progress(id, Progress::Copied { file: file.into(), bytes, of });
            if cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
        };
        let folder = kept::copy_model(&name, &material.files, &mut said).await?;
        let copy = Rc::new(Material::open(&folder, ModelFrom::Kept { name }).await?);
        // Data and adapter stay: it is the same model.
        *self.model.borrow_mut() = Some(copy.clone());
        Ok(Reply::Model { model: copy.info().await })
    }

    pub async fn kept_models(&self) -> Result<Reply> {
        let models = kept::models().await?;
        Ok(Reply::KeptModels { models: models.into_iter().map(|(name, bytes)| KeptModel { name, bytes }).collect() })
    }

    pub async fn delete_model(&self, name: &str) -> Result<Reply> {
        let open = self.model.borrow().as_ref().is_some_and(|m| m.from == ModelFrom::Kept { name: name.into() });
        if open {
            let reason = "it is open; open another model first".into();
            return Err(Error::Invalid { what: format!("deleting {name}"), reason });
        }
        kept::delete_model(name).await?;
        self.kept_models().await
    }

    pub async fn read_data(&self, from: &DataFrom, settings: &DataSettings, files: &[web_sys::File]) -> Result<Reply> {
        let material = self.model()?;
        let (name, sources) = match from {
            DataFrom::Embedded => {
                let mut parts = Vec::new();
                for name in ["train.jsonl", "valid.jsonl"] {
                    parts.push(in_memory(name, &beside_the_page(&format!("data/{name}")).await?).await?);
                }
                let valid = parts.pop();
                let train = parts.pop().unwrap_or_else(|| Source::memory("train.jsonl", Vec::new()));
                ("the tide log".to_string(), (train, valid))
            }
            DataFrom::Text { text } => {
                let rows = Source::memory("your text", typed(text).into_bytes());
                ("your text".to_string(), (rows, None))
            }
            DataFrom::Files => {
                let folder = Folder::of_files(files);
                let train = match folder.file("train.jsonl").await? {
                    Some(source) => Some(("train.jsonl".to_string(), source)),
                    None => match files {
                        [one] => folder.file(&one.name()).await?.map(|source| (one.name(), source)),
                        _ => None,
                    },
                };
                let (name, source) = train.ok_or_else(|| Error::NotFound {
                    what: "data file",
                    name: "train.jsonl".into(),
                    hint: Some("choose one file of rows, or a train.jsonl and perhaps a valid.jsonl".into()),
                })?;
                let valid = match folder.file("valid.jsonl").await? {
                    Some(valid) if name != "valid.jsonl" => Some(in_memory("valid.jsonl", &valid).await?),
                    _ => None,
                };
                let train = in_memory(&name, &source).await?;
                (name, (train, valid))
            }
        };
        let data = Rc::new(Data::open(&material, name, sources, settings).await?);
        *self.data.borrow_mut() = Some(data.clone());
        self.all_bytes.borrow_mut().clear();
        Ok(Reply::Data { data: data.info.clone() })
    }
}
