// Gradient of a norm's weight, dgamma[n] = sum over rows of dy * (x - mean) * r, or of its bias, dbeta[n] = sum of dy.
//
// One thread a column, rows in order, one accumulator that may start from the stored gradient: micro-batches carry.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 256)
    rows: u32, // rows of x and dy
    n: u32, // length of a row
    out_off: u32, // first element of the gradient
    carry: u32, // 1: the sum starts from the stored gradient; 0: from zero
}

const OP_GAMMA: u32 = 0u; // gradient of the weight
const OP_BETA: u32 = 1u; // gradient of the bias
override OP: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [rows, n]
@group(0) @binding(2) var<storage, read> stats: array<f32>; // stats [rows, 2] of norm_stats
@group(0) @binding(3) var<storage, read> dy: array<f32>; // dy [rows, n]
@group(0) @binding(4) var<storage, read_write> dw: array<f32>; // gradient [n]

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = wid.x + wid.y * nwg.x + p.first_group;
    if (group >= p.groups) {
        return;
    }
    let col = group * 256u + lane;
    if (col >= p.n) {
        return;
    }
    var acc = 0.0;
    if (p.carry == 1u) {
        acc = dw[p.out_off + col];
    }
    for (var row = 0u; row < p.rows; row++) {
        let at = row * p.n + col;
        if (OP == OP_GAMMA) {
            acc = fma(dy[at], (x[at] - stats[row * 2u]) * stats[row * 2u + 1u], acc);
        } else {
            acc += dy[at];
        }
    }
    dw[p.out_off + col] = acc;
}
