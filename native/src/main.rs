//! The `ebbtide` command: one file a subcommand, everything of substance in the library.

#![allow(clippy::print_stdout, clippy::print_stderr)] // a command line talks on these

mod demo;
mod doctor;
mod engine;
mod fuse;
mod generate;
mod inspect;
mod model;
mod plan;
mod probe;
mod progress;
mod report;
mod speeds;
mod text;
mod train;
mod training;
mod witness;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Train LoRA adapters on, and run, models larger than GPU memory, within a byte budget.
///
/// Without a subcommand the demo runs.
#[derive(Parser)]
#[command(name = "ebbtide", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

const EXAMPLES: &str = "\
Examples:
  ebbtide                                      the demo: a training with a quarter of the weights on the device
  ebbtide doctor                               what this machine offers, and what is missing
  ebbtide generate --model my-model --chat     talk with a model, within a budget
  ebbtide probe stream --budget floor --manual the first founding program at its floor
  ebbtide probe stream --json | jq .peak_bytes

Environment:
  EBBTIDE_ADAPTER   part of the name of the adapter to use
  EBBTIDE_LIMITS    `default`: ask only for WebGPU's default limits
  EBBTIDE_CACHE     folder for remembered speeds, instead of one in the user's cache

Exit status: 0 done, 1 failed while running, 2 bad input or usage, 3 budget refused,
4 no device, device lost or out of memory, 130 interrupted";

#[derive(Subcommand)]
enum Command {
    /// Train an adapter over a small model that comes with the program, with a quarter of its weights on the device.
    Demo(demo::DemoArgs),
    /// Show adapters, limits, features and speeds, what is missing and how to get it.
    Doctor(doctor::DoctorArgs),
    /// Write text: from a prompt or in a chat, with or without an adapter.
    Generate(generate::GenerateArgs),
    /// Merge an adapter into a model: a new folder of safetensors, written by streaming.
    Fuse(fuse::FuseArgs),
    /// List the tensors of a safetensors file or folder, from the headers alone.
    Inspect(inspect::InspectArgs),
    /// Forecast memory and traffic of a training run, without a GPU.
    Plan(Box<plan::PlanArgs>),
    /// Train a LoRA adapter within a budget.
    Train(Box<train::TrainArgs>),
    /// Run a program that measures one promise of the engine.
    #[command(subcommand)]
    Probe(probe::Probe),
}

fn main() -> ExitCode {
    // A closed pipe (`| head`) ends the command quietly instead of with a panic.
    #[cfg(unix)]
    restore_sigpipe();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => return report_usage(&usage),
    };
    let json = match &cli.command {
        Some(Command::Probe(probe)) => probe.json(),
        Some(Command::Doctor(args)) => args.json,
        Some(Command::Fuse(args)) => args.json,
        Some(Command::Generate(args)) => args.json,
        Some(Command::Inspect(args)) => args.json,
        Some(Command::Plan(args)) => args.json,
        Some(Command::Train(args)) => args.json,
        _ => false,
    };
    let result = match cli.command {
        None => demo::run(&demo::DemoArgs::default()),
        Some(Command::Demo(args)) => demo::run(&args),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Fuse(args)) => fuse::run(&args),
        Some(Command::Generate(args)) => generate::run(&args),
        Some(Command::Inspect(args)) => inspect::run(&args),
        Some(Command::Plan(args)) => plan::run(&args),
        Some(Command::Train(args)) => train::run(&args),
        Some(Command::Probe(probe)) => probe::run(&probe),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, json),
    }
}

/// Help, version, or what is wrong with the arguments; as JSON too where that was asked for.
fn report_usage(usage: &clap::Error) -> ExitCode {
    if usage.use_stderr() && std::env::args().any(|a| a == "--json") {
        let message = usage.to_string();
        println!("{}", serde_json::json!({ "error": { "code": "usage", "message": message.trim() } }));
    }
    // Fails only when the terminal is gone.
    let _ = usage.print();
    ExitCode::from(if usage.use_stderr() { 2 } else { 0 })
}

/// Says what went wrong, in words or as a JSON object, and gives the exit status.
fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let known = error.downcast_ref::<ebbtide::Error>();
    if json {
        let code = known.map_or("failed", |e| e.code());
        println!("{}", serde_json::json!({ "error": { "code": code, "message": format!("{error:#}") } }));
    }
    eprintln!("error: {error:#}");
    ExitCode::from(known.map_or(1, |e| e.exit_status()))
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn restore_sigpipe() {
    // SAFETY: called before any thread exists; restores the default that Rust's start-up replaced.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
