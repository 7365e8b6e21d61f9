//! `ebbtide demo`: the first founding program, explained.

use clap::Args;
use ebbtide::error::Bytes;

use crate::engine;
use crate::probe::stream::{StreamArgs, StreamReport, measure};

/// Arguments of `ebbtide demo`.
#[derive(Args, Clone, Debug, Default)]
pub struct DemoArgs {
    /// Part of the name of the adapter to use.
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    println!("ebbtide streams weights through a byte budget: loaded just before their layer, released just after,");
    println!("and loaded again, in reverse order, for the backward pass.\n");
    println!("A program of 20 layers (10 rounds through two weight files), forward and backward:\n");
    let cancel = engine::cancel_on_ctrl_c();
    let run = |budget: &str, rounds| -> anyhow::Result<StreamReport> {
        let args = StreamArgs {
            rounds,
            budget: budget.into(),
            manual: false,
            keep_free_0: false,
            down: None,
            up: None,
            x: None,
            out: None,
            device: args.device.clone(),
            json: false,
        };
        engine::wait(measure(&args, &cancel))
    };
    let all = run("all", 10)?;
    let floor = run("floor", 10)?;
    println!("  adapter: {}\n", all.adapter);
    println!("  {:<22} {:>12} {:>12} {:>7}  gradient", "budget", "peak bytes", "weights held", "loads");
    let row = |name: &str, r: &StreamReport| {
        let weights = r.peak_by_category.get(ebbtide::compile::Category::Weights);
        println!("  {name:<22} {:>12} {weights:>12} {:>7}  {}…", r.peak_bytes, r.loads, &r.grad_sha256[..12]);
    };
    row("all (resident)", &all);
    row("floor", &floor);
    row("floor, 1000 layers", &run("floor", 500)?);
    println!("\nThe first lines of the floor's trace, as they happened:\n");
    for line in floor.trace.iter().take(6) {
        println!("  {line}");
    }
    println!("  … {} more", floor.trace.len() - 6);
    anyhow::ensure!(
        all.grad_sha256 == floor.grad_sha256,
        "the gradients differ between budgets: this is a defect, please report it"
    );
    println!(
        "\nThe gradients are equal to the bit, the peak does not grow with depth, and each peak is the one that was"
    );
    println!(
        "planned before anything ran. A budget one byte below the floor of {} is refused:\n",
        Bytes(floor.floor_bytes)
    );
    if let Err(refused) = run(&(floor.floor_bytes - 1).to_string(), 10) {
        println!("  {refused}");
    }
    println!("\nNext: `ebbtide probe stream --help`, `ebbtide doctor`.");
    Ok(())
}
