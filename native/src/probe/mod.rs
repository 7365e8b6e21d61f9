//! `ebbtide probe`: programs that measure one promise of the engine each.

pub mod compile;
pub mod scale;
pub mod stream;

use clap::Subcommand;

/// The probes.
#[derive(Subcommand)]
pub enum Probe {
    /// The first founding program: weights loaded just before their layer, freed just after, reloaded in backward.
    Stream(stream::StreamArgs),
    /// The second founding program: a stack of transposed weights is folded without ever holding two copies of it.
    Compile(compile::CompileArgs),
    /// One LoRA step of a model of Llama's shape, made on the spot, that is far larger than the budget.
    Scale(scale::ScaleArgs),
}

impl Probe {
    /// Whether the output is JSON.
    pub fn json(&self) -> bool {
        match self {
            Probe::Stream(args) => args.json,
            Probe::Compile(args) => args.json,
            Probe::Scale(args) => args.json,
        }
    }
}

/// Runs a probe.
pub fn run(probe: &Probe) -> anyhow::Result<()> {
    match probe {
        Probe::Stream(args) => stream::run(args),
        Probe::Compile(args) => compile::run(args),
        Probe::Scale(args) => scale::run(args),
    }
}
