//! Kernels of training: cross-entropy, dropout, norms, the finite test, AdamW.

use ebbtide_shaders as sh;

use super::nn::{Fused, call};
use super::{Call, small};
use crate::error::{Error, Result};
use crate::nn::{Dropout, NnOp};

pub(super) fn lower(f: &Fused<'_>, op: &NnOp) -> Result<Vec<Call>> {
    match op {
        NnOp::CeLse { first, first_row, start } => ce_lse(f, *first, *first_row, *start),
        NnOp::CeLoss => ce_loss(f),
        NnOp::CeGrad { first, first_row } => ce_grad(f, *first, *first_row),
        NnOp::Dropout(spec) => dropout(f, spec),
        NnOp::Sumsq => sumsq(f),
        NnOp::ClipScale { max_norm } => clip_scale(f, *max_norm),
        NnOp::Nonfinite { bits } => nonfinite(f, *bits),
        NnOp::AdamW { beta1, beta2, eps } => adamw(f, *beta1, *beta2, *eps),
        other => Err(Error::Shape { op: "lower", reason: format!("{other:?} has no kernel") }),
    }
}

fn ce_lse(f: &Fused<'_>, first: u32, first_row: u32, start: bool) -> Result<Vec<Call>> {
    const OP: &str = "cross_entropy";
    let (logits, labels) = (f.operand(0)?, f.operand(1)?);
    let (rows, width) = f.rows(OP, &logits)?;
    let p = sh::ce_lse::Params {
        groups: rows,
        rows,
        width,
        first,
        stride: width,
        first_row,
        start: u32::from(start),
        ..Default::default()
    };
    let bindings = vec![(logits.whole(OP)?, false), (labels.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::ce_lse::SHADER, &[], bindings, &p, rows.into(), 4 * logits.shape.elements())])
}

fn ce_loss(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "cross_entropy";
    let (stats, labels) = (f.operand(0)?, f.operand(1)?);
    let rows = small(OP, labels.shape.elements())?;
    let groups = rows.div_ceil(256);
    let p = sh::ce_loss::Params { groups, rows, ..Default::default() };
    let bindings = vec![(stats.whole(OP)?, false), (labels.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::ce_loss::SHADER, &[], bindings, &p, groups.into(), 8 * u64::from(rows))])
}

fn ce_grad(f: &Fused<'_>, first: u32, first_row: u32) -> Result<Vec<Call>> {
    const OP: &str = "cross_entropy";
    let logits = f.operand(0)?;
    let (rows, width) = f.rows(OP, &logits)?;
    let groups = u64::from(rows) * u64::from(width.div_ceil(1024));
    let p = sh::ce_grad::Params {
        groups: small(OP, groups)?,
        rows,
        width,
        first,
        stride: width,
        first_row,
        scale: 1.0,
        ..Default::default()
    };
    let mut bindings = vec![(logits.whole(OP)?, false)];
    for i in 1..4 {
        bindings.push((f.operand(i)?.whole(OP)?, false));
    }
    bindings.push((f.out, true));
    Ok(vec![call(&sh::ce_grad::SHADER, &[], bindings, &p, groups, 4 * logits.shape.elements())])
}

fn dropout(f: &Fused<'_>, spec: &Dropout) -> Result<Vec<Call>> {
    const OP: &str = "dropout";
    let (x, ids, step) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let b = ids.shape.elements();
    let n = x.shape.dims().last().copied().unwrap_or(1);
    let t = x.shape.elements() / (b * n);
    let groups = (b * t * n.div_ceil(4)).div_ceil(256);
    let p = sh::dropout::Params {
        groups: small(OP, groups)?,
        b: small(OP, b)?,
        t: small(OP, t)?,
        n: small(OP, n)?,
        seed: spec.seed,
        site: spec.site,
        first_position: spec.first_position,
        threshold: (f64::from(spec.probability) * 4_294_967_296.0) as u32,
        scale: (1.0 / (1.0 - f64::from(spec.probability))) as f32,
        ..Default::default()
    };
    let bindings = vec![(x.whole(OP)?, false), (ids.whole(OP)?, false), (step.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::dropout::SHADER, &[], bindings, &p, groups, 16 * x.shape.elements())])
}

fn sumsq(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "global norm";
    let x = f.operand(0)?;
    let n = x.shape.elements();
    let groups = n.div_ceil(1024);
    let p = sh::sumsq::Params {
        groups: small(OP, groups)?,
        n: small(OP, n)?,
        x_off: small(OP, x.view.offset)?,
        out_off: small(OP, f.into().0)?,
        ..Default::default()
    };
    Ok(vec![call(&sh::sumsq::SHADER, &[], vec![(x.whole(OP)?, false), (f.out, true)], &p, groups, n)])
}

fn clip_scale(f: &Fused<'_>, max_norm: f32) -> Result<Vec<Call>> {
    const OP: &str = "global norm";
    let partials = f.operand(0)?;
    let count = small(OP, partials.shape.elements())?;
    let p = sh::clip_scale::Params { groups: 1, count, max_norm, scale: 1.0, ..Default::default() };
    let bindings = vec![(partials.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::clip_scale::SHADER, &[], bindings, &p, 1, count.into())])
}

fn nonfinite(f: &Fused<'_>, bits: u32) -> Result<Vec<Call>> {
    const OP: &str = "finite test";
    let x = f.operand(0)?;
    let n = x.shape.elements();
    let groups = n.div_ceil(1024);
    let p = sh::nonfinite::Params {
        groups: small(OP, groups)?,
        n: small(OP, n)?,
        x_off: small(OP, x.view.offset)?,
        word: 0,
        bits,
        ..Default::default()
    };
    Ok(vec![call(&sh::nonfinite::SHADER, &[], vec![(x.whole(OP)?, false), (f.out, true)], &p, groups, n)])
}

fn adamw(f: &Fused<'_>, beta1: f64, beta2: f64, eps: f64) -> Result<Vec<Call>> {
    const OP: &str = "adamw";
    let n = f.operand(0)?.shape.elements();
    let groups = n.div_ceil(1024);
    let p = sh::adamw::Params {
        groups: small(OP, groups)?,
        n: small(OP, n)?,
        off: 0,
        use_clip: 1,
        beta1: beta1 as f32,
        rest1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rest2: (1.0 - beta2) as f32,
        eps: eps as f32,
        ..Default::default()
    };
    let bindings = (0..6).map(|i| Ok((f.operand(i)?.whole(OP)?, i > 2))).collect::<Result<Vec<_>>>()?;
    Ok(vec![call(&sh::adamw::SHADER, &[], bindings, &p, groups, 8 * n)])
}
