//! What commands about models share: the model of a folder, the adapter as flags describe it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::Args;
use ebbtide::llm::adapters::{LoraSpec, Targets};
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::hub::{HubEnvironment, find_model, optional_file};
use ebbtide::llm::models::Model;
use ebbtide::{Catalog, Error, Result};

/// Which model.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// A folder with config.json and safetensors files, or ORG/NAME in the local hub cache (never the network).
    #[arg(long, value_name = "FOLDER|ORG/NAME", overrides_with = "model")]
    pub model: String,
}

impl ModelArgs {
    /// Opens the model: reads its configuration and the headers of its files.
    pub async fn open(&self) -> Result<Model> {
        open(&self.folder().await?).await
    }

    /// Its folder.
    pub async fn folder(&self) -> Result<PathBuf> {
        find_model(&self.model, &HubEnvironment::from_env()).await
    }
}

/// Opens the model of a folder.
pub async fn open(folder: &Path) -> Result<Model> {
    let Some(source) = optional_file(folder, "config.json")? else {
        return Err(Error::NotFound {
            what: "file",
            name: folder.join("config.json").display().to_string(),
            hint: Some("--model names a folder as the Hugging Face hub lays it out".into()),
        });
    };
    Model::new(ModelConfig::read(&source).await?, Catalog::open(folder).await?)
}

/// What adapter is trained.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Adapter")]
pub struct LoraArgs {
    /// Rank of the adapter.
    #[arg(long = "lora-rank", visible_alias = "rank", value_name = "R", default_value_t = 8)]
    pub rank: u64,
    /// Alpha: the adapter's part is multiplied by alpha / rank.
    #[arg(long = "lora-alpha", visible_alias = "alpha", value_name = "X", default_value_t = 16.0)]
    pub alpha: f64,
    /// Multiply by alpha / √rank instead.
    #[arg(long = "lora-rslora", visible_alias = "rslora")]
    pub rslora: bool,
    /// Share of the adapter's input that training sets to zero.
    #[arg(long = "lora-dropout", visible_alias = "dropout", value_name = "P", default_value_t = 0.0)]
    pub dropout: f32,
    /// Layers that get an adapter, by the end of their name, or `all-linear`. Default: q_proj,v_proj (c_attn for GPT-2).
    #[arg(long = "lora-targets", visible_alias = "target-modules", value_name = "NAMES")]
    pub target_modules: Option<String>,
    /// Train only the last so many blocks; -1: all.
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    pub num_layers: i64,
    /// Train only the blocks from the first number up to, not including, the second.
    #[arg(long, value_name = "FROM..TO", conflicts_with = "num_layers")]
    pub layers: Option<String>,
    /// Seed of the adapter's first values, of dropout, of the order of the rows and of samples.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u32,
}

impl LoraArgs {
    /// The adapter for a model.
    pub fn spec(&self, model: &Model) -> Result<LoraSpec> {
        let has = |name: &str| model.linear_layers().iter().any(|l| l.rsplit('.').next() == Some(name));
        let default = if has("q_proj") { "q_proj,v_proj" } else { "c_attn" };
        Ok(LoraSpec {
            rank: self.rank,
            alpha: self.alpha,
            rslora: self.rslora,
            dropout: self.dropout,
            seed: self.seed,
            targets: Targets::parse(self.target_modules.as_deref().unwrap_or(default))?,
            blocks: self.blocks(model.blocks())?,
        })
    }

    fn blocks(&self, all: usize) -> Result<Option<Range<usize>>> {
        if let Some(text) = &self.layers {
            let ends = text.split_once("..").and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
            return match ends {
                Some((from, to)) if from < to && to <= all => Ok(Some(from..to)),
                _ => {
                    let reason = format!("`{text}` is not possible; the model has blocks 0..{all}");
                    Err(Error::Invalid { what: "--layers".into(), reason })
                }
            };
        }
        match self.num_layers {
            -1 => Ok(None),
            n if n >= 1 && n as usize <= all => Ok(Some(all - n as usize..all)),
            n => {
                let reason = format!("{n} is not possible; -1 for all, or 1 to {all}");
                Err(Error::Invalid { what: "--num-layers".into(), reason })
            }
        }
    }
}
