//! The first founding program, automatically: the budget decides what stays and what is loaded again. The gradient has
//! the same bits at every budget; a budget that cannot be kept is refused in words, before any GPU work.
//!
//! `cargo run -p ebbtide --example stream_automatic`

#![allow(clippy::print_stdout)] // examples talk

mod common;

use ebbtide::event::NoEvents;
use ebbtide::{Budget, Cancel, Catalog, Device, DeviceChoice, Graph, Program, Result, Session, compile};

fn program(catalog: &Catalog) -> Result<Program> {
    let mut g = Graph::new();
    let x = g.input("x", [96, 48])?;
    let mut h = x;
    for _ in 0..10 {
        for name in ["down", "up"] {
            let segment = catalog.segment(name)?;
            let (w, b) = (g.weight(&segment, "w")?, g.weight(&segment, "b")?);
            h = g.matmul(h, w, Some(b))?;
        }
    }
    let loss = g.mean(h)?;
    g.value_and_grad(loss, &[x])
}

async fn run() -> Result<()> {
    let catalog = common::catalog().await?;
    let step = [program(&catalog)?];
    let device = Device::open(&DeviceChoice::from_env()).await?;
    let x = common::numbers(3, 96 * 48);
    let mut gradients = Vec::new();
    for budget in [Budget::All, Budget::Floor] {
        let set = compile(&step, &catalog, device.caps(), budget)?;
        let peak = set.planned_peak();
        let mut session = Session::new(&device, &catalog, set).await?;
        let out = session.run(0, &[("x", bytemuck::cast_slice(&x))], &Cancel::new(), &mut NoEvents).await?;
        println!("{budget}: peak {peak} bytes, {} loads in this step", out.loads);
        gradients.push(out.bytes("grad.0")?.to_vec());
    }
    assert!(gradients[0] == gradients[1], "equal to the bit");
    if let Err(refused) = compile(&step, &catalog, device.caps(), Budget::bytes(10_000)) {
        println!("{refused}");
    }
    Ok(())
}

/// Runs the example.
pub fn main() -> Result<()> {
    pollster::block_on(run())
}
