//! `ebbtide inspect`: the tensors of a file or folder, from the headers alone.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use ebbtide::Catalog;
use ebbtide::error::Bytes;
use serde::Serialize;

use crate::engine;

/// Arguments of `ebbtide inspect`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide inspect model.safetensors
  ebbtide inspect my-model/ --json | jq '.tensors[] | select(.pieces > 1)'")]
pub struct InspectArgs {
    /// A safetensors file, or a folder of them.
    pub path: PathBuf,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Tensor {
    file: String,
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    /// Row pieces it is streamed in; 0 for a type that cannot be a weight.
    pieces: usize,
}

#[derive(Serialize)]
struct Report {
    format: u32,
    files: usize,
    weight_bytes: u64,
    fingerprint: String,
    tensors: Vec<Tensor>,
}

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<()> {
    let catalog = engine::wait(Catalog::open(&args.path))?;
    let mut tensors = Vec::new();
    for file in catalog.files() {
        for t in &file.header.tensors {
            let weight =
                catalog.weights().iter().find(|w| w.source == file.source && w.range == t.range && !t.range.is_empty());
            tensors.push(Tensor {
                file: file.stem.to_string(),
                name: t.name.to_string(),
                dtype: t.dtype.to_string(),
                shape: t.shape.clone(),
                bytes: t.range.end - t.range.start,
                pieces: weight.map_or(usize::from(t.dtype.weight().is_some()), |w| w.pieces.len()),
            });
        }
    }
    let report = Report {
        format: 1,
        files: catalog.files().len(),
        weight_bytes: catalog.weights().iter().map(|w| w.bytes()).sum(),
        fingerprint: format!("{:016x}", catalog.fingerprint()),
        tensors,
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    let width = report.tensors.iter().map(|t| t.name.len()).max().unwrap_or(4);
    for t in &report.tensors {
        let pieces = if t.pieces > 1 { format!("  in {} pieces", t.pieces) } else { String::new() };
        // A name from a file never reaches the terminal as a control sequence.
        let name: String =
            t.name.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect();
        println!("{name:<width$}  {:<5} {:<20} {:>14}{pieces}", t.dtype, format!("{:?}", t.shape), t.bytes);
    }
    println!("\n{} tensors in {} files, {}", report.tensors.len(), report.files, Bytes(report.weight_bytes));
    Ok(())
}
