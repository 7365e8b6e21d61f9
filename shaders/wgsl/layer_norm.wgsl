// y = (x - mean) * r * w + bias, r = 1 / sqrt(variance + eps), one workgroup a row: 256 partials, then a tree.
//
// Two passes, mean first: the one-pass form loses the variance of rows far from zero.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // rows of x
    n: u32, // length of a row
    w_off: u32, // first element of the weight
    bias_off: u32, // first element of the bias
    has_bias: u32, // 1: the bias is added
    inv_n: f32, // 1 / n
    eps: f32, // added to the mean square
}

// Dtypes: 0 f32, 1 f16, 2 bf16.
override W_DTYPE: u32 = 0u;
override BIAS_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [rows, n]
@group(0) @binding(2) var<storage, read> w: array<u32>; // w [n], W_DTYPE
@group(0) @binding(3) var<storage, read> bias: array<u32>; // bias [n], BIAS_DTYPE; w again where there is none
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // y [rows, n]

fn load_w(i: u32) -> f32 {
    if (W_DTYPE == 0u) {
        return bitcast<f32>(w[i]);
    }
    let word = w[i >> 1u];
    if (W_DTYPE == 1u) {
        return unpack2x16float(word)[i & 1u];
    }
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (i & 1u) == 1u));
}

fn load_bias(i: u32) -> f32 {
    if (BIAS_DTYPE == 0u) {
        return bitcast<f32>(bias[i]);
    }
    let word = bias[i >> 1u];
    if (BIAS_DTYPE == 1u) {
        return unpack2x16float(word)[i & 1u];
    }
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (i & 1u) == 1u));
}

var<workgroup> lanes: array<f32, 256>;

// Sum of all lanes by a fixed binary tree; every lane gets it.
fn tree_sum(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    lanes[lane] = x;
    for (var step = 128u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if (lane < step) {
            lanes[lane] = lanes[lane] + lanes[lane + step];
        }
    }
    workgroupBarrier();
    return lanes[0];
}

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
    let at = group * p.n;
    var sum = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        sum += x[at + i];
    }
    let mean = tree_sum(lane, sum) * p.inv_n;
    var squares = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        let d = x[at + i] - mean;
        squares = fma(d, d, squares);
    }
    let r = inverseSqrt(fma(tree_sum(lane, squares), p.inv_n, p.eps));
    for (var i = lane; i < p.n; i += 256u) {
        let scaled = (x[at + i] - mean) * r;
        let weight = load_w(p.w_off + i);
        if (p.has_bias == 1u) {
            y[at + i] = fma(scaled, weight, load_bias(p.bias_off + i));
        } else {
            y[at + i] = scaled * weight;
        }
    }
}
