// dx = r * (g - xhat * mean(g * xhat)), g = dy * (w + plus), xhat = x * r; r is computed again as in rms_norm.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: rows
    rows: u32, // rows of x
    n: u32, // length of a row
    w_off: u32, // first element of the weight
    inv_n: f32, // 1 / n
    eps: f32, // added to the mean square
    plus: f32, // added to every weight: 1 where the file stores gain - 1, else 0
}

// 0 f32, 1 f16, 2 bf16.
override W_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [rows, n]
@group(0) @binding(2) var<storage, read> w: array<u32>; // w [n], W_DTYPE
@group(0) @binding(3) var<storage, read> dy: array<f32>; // dy [rows, n]
@group(0) @binding(4) var<storage, read_write> dx: array<f32>; // dx [rows, n]

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
        sum = fma(x[at + i], x[at + i], sum);
    }
    let r = inverseSqrt(fma(tree_sum(lane, sum), p.inv_n, p.eps));
    var along = 0.0;
    for (var i = lane; i < p.n; i += 256u) {
        let g = dy[at + i] * (load_w(p.w_off + i) + p.plus);
        along = fma(g, x[at + i] * r, along);
    }
    let mean = tree_sum(lane, along) * p.inv_n;
    for (var i = lane; i < p.n; i += 256u) {
        let g = dy[at + i] * (load_w(p.w_off + i) + p.plus);
        dx[at + i] = r * fma(-(x[at + i] * r), mean, g);
    }
}
