//! `ebbtide fuse`: an adapter merged into a model, as a new folder of safetensors.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ebbtide::error::Bytes;
use ebbtide::llm::fuse::{Fusion, fuse};
use ebbtide::weights::DType;
use serde_json::json;

use crate::engine;
use crate::model::{self, ModelArgs};
use crate::witness::Witness;

/// Arguments of `ebbtide fuse`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide fuse --model my-model --adapter my-adapter --out merged
  ebbtide fuse --model ORG/NAME --adapter my-adapter --out merged --dtype f16
  ebbtide generate --model merged --prompt 'Once upon a time'

The folder appears whole or not at all and is never written over one that is there. No GPU is needed. An adapter of a tied
model's head or embedding makes it an untied one, with both tensors.")]
pub struct FuseArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The adapter, in PEFT's format.
    #[arg(long, visible_alias = "adapter-path", value_name = "FOLDER")]
    adapter: PathBuf,
    /// The new folder.
    #[arg(long, visible_alias = "save-path", value_name = "FOLDER")]
    out: PathBuf,
    /// The type of all floating-point tensors. Default: each keeps its own.
    #[arg(long, value_enum)]
    dtype: Option<Type>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Types that a merged model may be stored in.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
}

/// Runs the command.
pub fn run(args: &FuseArgs) -> anyhow::Result<()> {
    engine::wait(merge(args))
}

async fn merge(args: &FuseArgs) -> anyhow::Result<()> {
    let cancel = engine::cancel_on_ctrl_c();
    let witness = Witness::start();
    let folder = args.model.folder().await?;
    let model = model::open(&folder).await?;
    let fusion = Fusion::open(&args.adapter, &model).await?;
    let dtype = args.dtype.map(|t| match t {
        Type::F32 => DType::F32,
        Type::F16 => DType::F16,
        Type::Bf16 => DType::BF16,
    });
    let bar = if args.json { indicatif::ProgressBar::hidden() } else { indicatif::ProgressBar::new(0) };
    bar.set_style(indicatif::ProgressStyle::with_template(
        "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    )?);
    let mut progress = |done: u64, all: u64| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let report = fuse(&model, &folder, &fusion, &args.out, dtype, &cancel, &mut progress).await?;
    bar.finish_and_clear();
    let seen = witness.finish();
    if args.json {
        let line = json!({
            "format": 1,
            "out": args.out,
            "merged": report.merged,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "files": report.files,
            "untied": report.untied,
            "witness": seen,
        });
        println!("{line}");
        return Ok(());
    }
    println!(
        "merged {} of {} tensors into {}, {}",
        report.merged,
        report.tensors,
        args.out.display(),
        Bytes(report.bytes)
    );
    if report.untied {
        println!("the head and the embedding were one tensor and are two now (`tie_word_embeddings` is false)");
    }
    Ok(())
}
