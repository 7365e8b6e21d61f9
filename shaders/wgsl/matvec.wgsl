// y[m,n] = alpha * (carry ? y : 0 + sum over k of x[m,k] W[k,n]) + bias[n], for few rows m.
//
// Another op than `matmul`, with a geometry of its own that belongs to the op: element k goes to partial (k / 4) % 32, each
// partial is one accumulator over its k in order, and the 32 partials are added by a binary tree. A carried value enters
// partial 0. The graph chooses it by shape, before any cut; a weight that is cut along k is a matmul.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: m * ceil(n / 8)
    m: u32, // rows of x and y
    n: u32, // outputs a row
    k: u32, // length of the sum
    x_off: u32, // first element of x
    x_m: u32, // stride of x over m
    x_k: u32, // stride of x over k
    w_off: u32, // first element of W
    w_k: u32, // stride of W over k
    w_n: u32, // stride of W over n
    y_off: u32, // first element of y
    y_m: u32, // stride of y over m
    y_n: u32, // stride of y over n
    carry: u32, // 1: the sum starts from the stored y; 0: from zero
    has_bias: u32, // 1: bias is added last
    bias_off: u32, // first element of the bias
    alpha: f32, // factor of the sum, applied before the bias
}

// Dtypes: 0 f32, 1 f16, 2 bf16.
override W_DTYPE: u32 = 0u;
override BIAS_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [m, k], strided
@group(0) @binding(2) var<storage, read> w: array<u32>; // W [k, n], strided, W_DTYPE
@group(0) @binding(3) var<storage, read> bias: array<u32>; // bias [n], BIAS_DTYPE; w again where there is none
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // y [m, n], strided

// 8 outputs of 32 partials each.
var<workgroup> partial: array<f32, 256>;

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
    let tiles = (p.n + 7u) / 8u;
    let row = group / tiles;
    let col = group % tiles * 8u + lane / 32u;
    let part = lane % 32u;
    let stored = p.y_off + row * p.y_m + col * p.y_n;
    var acc = 0.0;
    if (col < p.n) {
        if (p.carry == 1u && part == 0u) {
            acc = y[stored];
        }
        let x_at = p.x_off + row * p.x_m;
        let w_at = p.w_off + col * p.w_n;
        for (var start = part * 4u; start < p.k; start += 128u) {
            for (var k = start; k < min(start + 4u, p.k); k++) {
                acc = fma(x[x_at + k * p.x_k], load_w(w_at + k * p.w_k), acc);
            }
        }
    }
    partial[lane] = acc;
    for (var step = 16u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if (part < step) {
            partial[lane] = partial[lane] + partial[lane + step];
        }
    }
    if (part == 0u && col < p.n) {
        var out = partial[lane];
        // One rounding whatever a compiler fuses, as in matmul.
        if (p.has_bias == 1u) {
            out = fma(p.alpha, out, load_bias(p.bias_off + col));
        } else if (p.alpha != 1.0) {
            out = p.alpha * out;
        }
        y[stored] = out;
    }
}
