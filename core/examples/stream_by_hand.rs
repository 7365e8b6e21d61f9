//! The first founding program, by hand: each weight file is loaded just before its layer and released just after it;
//! in the backward pass the same happens in reverse. Peak weight memory is one file, however many layers run.
//!
//! `cargo run -p ebbtide --example stream_by_hand`

#![allow(clippy::print_stdout)] // examples talk

mod common;

use ebbtide::compile::Options;
use ebbtide::{Budget, Cancel, Device, DeviceChoice, Event, Graph, Result, Session, compile_with};

async fn run() -> Result<()> {
    let catalog = common::catalog().await?;
    let (down, up) = (catalog.segment("down")?, catalog.segment("up")?);

    let mut g = Graph::new();
    let x = g.input("x", [96, 48])?;
    let mut h = x;
    for _ in 0..10 {
        h = g.with(&down, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?)))?;
        h = g.with(&up, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?)))?;
    }
    let loss = g.mean(h)?;
    let step = g.value_and_grad(loss, &[x])?;

    let device = Device::open(&DeviceChoice::from_env()).await?;
    let once = Options { once: true, ..Options::default() };
    let set = compile_with(&[step], &catalog, device.caps(), Budget::bytes(74_000), once)?;
    println!("planned peak: {} bytes", set.planned_peak());
    let mut session = Session::new(&device, &catalog, set).await?;
    let x = common::numbers(3, 96 * 48);
    let mut trace = |event: Event| match event {
        Event::Load { segment, pass, .. } => println!("{pass:?}: load {segment}"),
        Event::Evict { segment, pass } => println!("{pass:?}: release {segment}"),
        _ => {}
    };
    let out = session.run(0, &[("x", bytemuck::cast_slice(&x))], &Cancel::new(), &mut trace).await?;
    println!("mean {:e}, {} loads, peak {} bytes", out.f32("loss")?[0], out.loads, device.peak_memory());
    assert!(device.peak_memory() <= 74_000 && out.loads == 40);
    Ok(())
}

/// Runs the example.
pub fn main() -> Result<()> {
    pollster::block_on(run())
}
