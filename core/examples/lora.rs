//! LoRA on two linear layers: the weights stream through the smallest budget, only the adapters are trained.
//!
//! `cargo run -p ebbtide --example lora`

#![allow(clippy::print_stdout)] // examples talk

mod common;

use ebbtide::event::NoEvents;
use ebbtide::graph::{Shape, Unary};
use ebbtide::nn::{AdamW, Lora, Params, linear_lora, train_step};
use ebbtide::{Budget, Cancel, Device, DeviceChoice, Graph, Result, Session, compile};

async fn run() -> Result<()> {
    let catalog = common::catalog().await?;
    let mut params = Params::new();
    for (name, inputs, outputs) in [("down", 48, 64), ("up", 64, 48)] {
        params.add(&format!("{name}.a"), Shape::new(&[4, inputs])?)?;
        params.add(&format!("{name}.b"), Shape::new(&[outputs, 4])?)?;
    }
    let mut g = Graph::new();
    let values = params.bind(&mut g)?;
    let (x, target) = (g.input("x", [32, 48])?, g.input("target", [32, 48])?);
    let mut h = x;
    for (i, name) in ["down", "up"].into_iter().enumerate() {
        let w = g.weight(&catalog.segment(name)?, "w")?;
        let w = g.transpose(w)?;
        let lora = Lora { a: values.windows[2 * i], b: values.windows[2 * i + 1], scale: 2.0, input: None };
        h = linear_lora(&mut g, h, w, None, lora)?;
        h = g.unary(Unary::Tanh, h)?;
    }
    let minus = g.scale(target, -1.0)?;
    let error = g.add(h, minus)?;
    let squared = g.mul(error, error)?;
    let loss = g.mean(squared)?;
    let adamw = AdamW::default();
    let step = train_step(g, loss, &params, &values, &adamw)?;

    let device = Device::open(&DeviceChoice::from_env()).await?;
    let mut session =
        Session::new(&device, &catalog, compile(&[step], &catalog, device.caps(), Budget::Floor)?).await?;
    // A small and random, B zero: the adapter begins as nothing.
    let mut first = common::numbers(9, params.arrays()[0] as usize);
    params.iter().for_each(|p| {
        let scale = if p.name.ends_with(".a") { 0.1 } else { 0.0 };
        first[p.offset as usize..][..p.shape.elements() as usize].iter_mut().for_each(|v| *v *= scale);
    });
    session.write_state(&Params::values_name(0), bytemuck::cast_slice(&first)).await?;
    let (x, target) = (common::numbers(7, 32 * 48), common::numbers(8, 32 * 48));
    let mut losses = Vec::new();
    for s in 1..=60 {
        let hyper = adamw.hyper(1e-2, s);
        let inputs: [(&str, &[u8]); 3] = [
            ("x", bytemuck::cast_slice(&x)),
            ("target", bytemuck::cast_slice(&target)),
            ("hyper", bytemuck::cast_slice(&hyper)),
        ];
        losses.push(session.run(0, &inputs, &Cancel::new(), &mut NoEvents).await?.f32("loss")?[0]);
    }
    println!("loss {} → {}, peak {} bytes", losses[0], losses[59], device.peak_memory());
    assert!(losses[59] < 0.9 * losses[0]);
    Ok(())
}

/// Runs the example.
pub fn main() -> Result<()> {
    pollster::block_on(run())
}
