//! A function with a backward of its own, and hooks that see values as they stream past, forward and backward.
//!
//! `cargo run -p ebbtide --example custom_function`

#![allow(clippy::print_stdout)] // examples talk

mod common;

use ebbtide::event::NoEvents;
use ebbtide::graph::{HookWhen, Unary};
use ebbtide::{Budget, Cancel, Device, DeviceChoice, Graph, Result, Session, Tensor, compile};

/// The sign of x, whose gradient passes straight through.
fn straight_through_sign(g: &mut Graph, x: Tensor) -> Result<Tensor> {
    let forward = |g: &mut Graph, inputs: &[Tensor]| {
        let size = g.unary(Unary::Abs, inputs[0])?;
        g.binary(ebbtide::graph::Binary::Div, inputs[0], size)
    };
    g.custom(&[x], forward, |_, call| Ok(vec![Some(call.grad)]))
}

async fn run() -> Result<()> {
    let catalog = common::catalog().await?;
    let down = catalog.segment("down")?;
    let mut g = Graph::new();
    let x = g.input("x", [4, 48])?;
    let h = g.with(&down, |g, w| g.matmul(x, w.get("w")?, Some(w.get("b")?)))?;
    let h = g.hook(h, "hidden", HookWhen::Value, true)?;
    let s = straight_through_sign(&mut g, h)?;
    let loss = g.mean(s)?;
    let step = g.value_and_grad(loss, &[x])?;

    let device = Device::open(&DeviceChoice::from_env()).await?;
    let set = compile(&[step], &catalog, device.caps(), Budget::Floor)?;
    let mut session = Session::new(&device, &catalog, set).await?;
    session.on_hook(|call| {
        let first = call.value.and_then(|v| v.first_chunk::<4>()).map(|b| f32::from_le_bytes(*b));
        println!("{} in the {:?} pass: first element {first:?}", call.name, call.pass);
        Ok(())
    });
    let x = common::numbers(5, 4 * 48);
    let out = session.run(0, &[("x", bytemuck::cast_slice(&x))], &Cancel::new(), &mut NoEvents).await?;
    println!("mean of signs {}", out.f32("loss")?[0]);
    assert!(out.f32("grad.0")?.iter().any(|g| *g != 0.0));
    Ok(())
}

/// Runs the example.
pub fn main() -> Result<()> {
    pollster::block_on(run())
}
