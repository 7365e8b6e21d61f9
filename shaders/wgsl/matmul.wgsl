// C[b0,b1,m,n] = alpha * (carry ? C : 0 + A[b0,b1,m,k] B[b0,b1,k,n]) + bias[n].
//
// One f32 accumulator an output, over ascending k, by explicit fma: this order is the definition of the op, so every other
// tiling, and every cut along m, n or (through carry) k, gives the same bits. Strides make all transposed forms and the
// broadcast of grouped heads one kernel; u32 arithmetic wraps, so a stride over k may be negative: a sum over descending k.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: b0 * b1 * ceil(m / 32) * ceil(n / 32)
    m: u32, // rows of C
    n: u32, // columns of C
    k: u32, // length of the sum
    b0: u32, // outer batch
    b1: u32, // inner batch
    a_off: u32, // first element of A
    a_b0: u32, // stride of A over the outer batch
    a_b1: u32, // stride of A over the inner batch
    a_m: u32, // stride of A over m
    a_k: u32, // stride of A over k
    b_off: u32, // first element of B
    bb0: u32, // stride of B over the outer batch
    bb1: u32, // stride of B over the inner batch
    b_k: u32, // stride of B over k
    b_n: u32, // stride of B over n
    c_off: u32, // first element of C
    c_b0: u32, // stride of C over the outer batch
    c_b1: u32, // stride of C over the inner batch
    c_m: u32, // stride of C over m
    c_n: u32, // stride of C over n
    carry: u32, // 1: the sum starts from the stored C; 0: from zero
    has_bias: u32, // 1: bias is added last
    bias_off: u32, // first element of the bias
    alpha: f32, // factor of the sum, applied before the bias
}

// Dtypes: 0 f32, 1 f16, 2 bf16.
override A_DTYPE: u32 = 0u;
override B_DTYPE: u32 = 0u;
override BIAS_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<u32>; // A [b0, b1, m, k], strided, A_DTYPE
@group(0) @binding(2) var<storage, read> b: array<u32>; // B [b0, b1, k, n], strided, B_DTYPE
@group(0) @binding(3) var<storage, read> bias: array<u32>; // bias [n], BIAS_DTYPE; b again where there is none
@group(0) @binding(4) var<storage, read_write> c: array<f32>; // C [b0, b1, m, n], strided

fn narrow(word: u32, i: u32, dtype: u32) -> f32 {
    if (dtype == 1u) {
        return unpack2x16float(word)[i & 1u];
    }
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (i & 1u) == 1u));
}

fn load_a(i: u32) -> f32 {
    if (A_DTYPE == 0u) {
        return bitcast<f32>(a[i]);
    }
    return narrow(a[i >> 1u], i, A_DTYPE);
}

fn load_b(i: u32) -> f32 {
    if (B_DTYPE == 0u) {
        return bitcast<f32>(b[i]);
    }
    return narrow(b[i >> 1u], i, B_DTYPE);
}

fn load_bias(i: u32) -> f32 {
    if (BIAS_DTYPE == 0u) {
        return bitcast<f32>(bias[i]);
    }
    return narrow(bias[i >> 1u], i, BIAS_DTYPE);
}

@compute @workgroup_size(8, 8)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_id) lid: vec3<u32>,
) {
    let group = wid.x + wid.y * nwg.x + p.first_group;
    if (group >= p.groups) {
        return;
    }
    let tiles_n = (p.n + 31u) / 32u;
    let tiles_m = (p.m + 31u) / 32u;
    let batch = group / (tiles_n * tiles_m);
    let i0 = batch / p.b1;
    let i1 = batch % p.b1;
    let row = (group / tiles_n) % tiles_m * 32u + lid.y * 4u;
    let col = group % tiles_n * 32u + lid.x * 4u;

    // Rows and columns past the edge repeat the last one and are not stored: no branch in the loop.
    var a_at = array<u32, 4>();
    var b_at = array<u32, 4>();
    for (var i = 0u; i < 4u; i++) {
        a_at[i] = p.a_off + i0 * p.a_b0 + i1 * p.a_b1 + min(row + i, p.m - 1u) * p.a_m;
        b_at[i] = p.b_off + i0 * p.bb0 + i1 * p.bb1 + min(col + i, p.n - 1u) * p.b_n;
    }
    let c_at = p.c_off + i0 * p.c_b0 + i1 * p.c_b1;

    var acc = array<vec4<f32>, 4>();
    if (p.carry == 1u) {
        for (var i = 0u; i < 4u; i++) {
            for (var j = 0u; j < 4u; j++) {
                acc[i][j] = c[c_at + min(row + i, p.m - 1u) * p.c_m + min(col + j, p.n - 1u) * p.c_n];
            }
        }
    }
    var a_k = 0u;
    var b_k = 0u;
    for (var k = 0u; k < p.k; k++) {
        let bv = vec4<f32>(load_b(b_at[0] + b_k), load_b(b_at[1] + b_k), load_b(b_at[2] + b_k), load_b(b_at[3] + b_k));
        acc[0] = fma(vec4<f32>(load_a(a_at[0] + a_k)), bv, acc[0]);
        acc[1] = fma(vec4<f32>(load_a(a_at[1] + a_k)), bv, acc[1]);
        acc[2] = fma(vec4<f32>(load_a(a_at[2] + a_k)), bv, acc[2]);
        acc[3] = fma(vec4<f32>(load_a(a_at[3] + a_k)), bv, acc[3]);
        a_k += p.a_k;
        b_k += p.b_k;
    }

    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if (row + i < p.m && col + j < p.n) {
                var out = acc[i][j];
                // fma, since a compiler is free to fuse a plain alpha * x + bias: with it there is one rounding everywhere.
                if (p.has_bias == 1u) {
                    out = fma(p.alpha, out, load_bias(p.bias_off + col + j));
                } else if (p.alpha != 1.0) {
                    out = p.alpha * out;
                }
                c[c_at + (row + i) * p.c_m + (col + j) * p.c_n] = out;
            }
        }
    }
}
