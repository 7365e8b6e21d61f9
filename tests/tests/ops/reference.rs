//! Ops as a textbook has them, in f64: no geometry, no blocks, nothing shared with the engine.

/// `x` `[m, k]` · `w`ᵀ `[n, k]`.
pub fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, k: usize, n: usize) -> Vec<f64> {
    let m = x.len().checked_div(k).unwrap_or(0);
    let mut y = Vec::with_capacity(m * n);
    for row in 0..m {
        for col in 0..n {
            let sum: f64 = (0..k).map(|i| x[row * k + i] * w[col * k + i]).sum();
            y.push(sum + bias.map_or(0.0, |b| b[col]));
        }
    }
    y
}

/// `x` `[m, k]` · `w` `[k, n]`.
pub fn matmul(x: &[f64], w: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    let mut y = vec![0.0; m * n];
    for row in 0..m {
        for i in 0..k {
            for col in 0..n {
                y[row * n + col] += x[row * k + i] * w[i * n + col];
            }
        }
    }
    y
}

pub fn softmax(x: &[f64], n: usize) -> Vec<f64> {
    x.chunks(n)
        .flat_map(|row| {
            let top = row.iter().fold(f64::MIN, |m, v| m.max(*v));
            let e: Vec<f64> = row.iter().map(|v| (v - top).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(move |v| v / sum)
        })
        .collect()
}

pub fn rms_norm(x: &[f64], w: &[f64], eps: f64, plus: f64) -> Vec<f64> {
    x.chunks(w.len())
        .flat_map(|row| {
            let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
            let r = 1.0 / (mean + eps).sqrt();
            row.iter().zip(w).map(move |(v, w)| v * r * (w + plus)).collect::<Vec<_>>()
        })
        .collect()
}

pub fn layer_norm(x: &[f64], w: &[f64], bias: Option<&[f64]>, eps: f64) -> Vec<f64> {
    x.chunks(w.len())
        .flat_map(|row| {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let r = 1.0 / (row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n + eps).sqrt();
            (0..row.len()).map(|i| (row[i] - mean) * r * w[i] + bias.map_or(0.0, |b| b[i])).collect::<Vec<_>>()
        })
        .collect()
}

/// `x` `[b, t, h, d]` turned by angles `[t, half]` (or `[b, t, half]`) given as cosines and sines.
pub fn rope(x: &[f64], dims: [usize; 4], cos: &[f64], sin: &[f64], half: usize, interleaved: bool) -> Vec<f64> {
    let [b, t, h, d] = dims;
    let mut y = x.to_vec();
    let rows = cos.len() / (t * half).max(1);
    for ib in 0..b {
        for it in 0..t {
            for ih in 0..h {
                let at = ((ib * t + it) * h + ih) * d;
                for i in 0..half {
                    let tab = if rows > 1 { (ib * t + it) * half + i } else { it * half + i };
                    let (p, q) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    y[at + p] = x[at + p] * cos[tab] - x[at + q] * sin[tab];
                    y[at + q] = x[at + q] * cos[tab] + x[at + p] * sin[tab];
                }
            }
        }
    }
    y
}

/// Extents of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub b: usize,
    pub t: usize,
    pub s: usize,
    pub h: usize,
    pub hk: usize,
    pub d: usize,
}

/// A materialised softmax over the keys that a query sees; q `[b, t, h, d]`, k and v `[b, s, hk, d]`.
#[allow(clippy::too_many_arguments, reason = "the operands and the mask of one formula")]
pub fn attention(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    rows: &[f64],
    e: Heads,
    causal: bool,
    window: usize,
    scale: f64,
) -> Vec<f64> {
    let Heads { b, t, s, h, hk, d } = e;
    let mut out = vec![0.0; b * t * h * d];
    for ib in 0..b {
        let (start, keys) = (rows[2 * ib] as usize, (rows[2 * ib + 1] as usize).min(s));
        for it in 0..t {
            for ih in 0..h {
                let kv = ih / (h / hk);
                let position = start + it;
                let seen: Vec<usize> = (0..keys)
                    .filter(|j| (!causal || *j <= position) && (window == 0 || j + window > position))
                    .collect();
                let at = ((ib * t + it) * h + ih) * d;
                let key = |j: usize| ((ib * s + j) * hk + kv) * d;
                let scores: Vec<f64> =
                    seen.iter().map(|j| (0..d).map(|i| q[at + i] * k[key(*j) + i]).sum::<f64>() * scale).collect();
                if scores.is_empty() {
                    continue;
                }
                for (w, j) in softmax(&scores, scores.len()).iter().zip(&seen) {
                    for i in 0..d {
                        out[at + i] += w * v[key(*j) + i];
                    }
                }
            }
        }
    }
    out
}

/// Σ weight · (log Σ exp(logits) − label's logit); masked where the label is negative.
pub fn cross_entropy(h: &[f64], head: &[f64], d: usize, labels: &[f64], weight: &[f64]) -> f64 {
    token_losses(h, head, d, labels).iter().zip(weight).map(|(l, w)| l * w).sum()
}

pub fn token_losses(h: &[f64], head: &[f64], d: usize, labels: &[f64]) -> Vec<f64> {
    let v = head.len() / d;
    let logits = linear(h, head, None, d, v);
    labels
        .iter()
        .enumerate()
        .map(|(i, label)| {
            let row = &logits[i * v..][..v];
            let top = row.iter().fold(f64::MIN, |m, x| m.max(*x));
            let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
            if *label < 0.0 { 0.0 } else { top + sum.ln() - row[*label as usize] }
        })
        .collect()
}
