// The product of `matmul`, bit for bit, for operands that lie well: the rows of A and either the rows or the columns of B are
// read as vectors of four along k or n. Each thread has 8 x 8 outputs and uses no workgroup memory, which is what software
// adapters are fastest with.
//
// Needs: f32 A with stride 1 over k; B with stride 1 over k (B_ALONG_N 0) or over n (1); k, all offsets and the other strides
// multiples of 4 (of 8 where B is f16 or bf16), so that every vector is aligned; with B_ALONG_N also n, and at least 8.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: b0 * b1 * ceil(m / 32) * ceil(n / 64)
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
// As in `matmul`, so that both take the same constants; A is f32.
override A_DTYPE: u32 = 0u;
override B_DTYPE: u32 = 0u;
override BIAS_DTYPE: u32 = 0u;
// Whether vectors of B run along n instead of along k.
override B_ALONG_N: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>; // A [b0, b1, m, k], rows dense
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>; // B [b0, b1, k, n], dense along k or n, B_DTYPE
@group(0) @binding(3) var<storage, read> bias: array<u32>; // bias [n], BIAS_DTYPE; b again where there is none
@group(0) @binding(4) var<storage, read_write> c: array<f32>; // C [b0, b1, m, n], strided

// Two 16-bit numbers of a word.
fn two(word: u32) -> vec2<f32> {
    if (B_DTYPE == 1u) {
        return unpack2x16float(word);
    }
    return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xffff0000u));
}

// Elements i .. i + 3 of B, i a multiple of 4.
fn load_b(i: u32) -> vec4<f32> {
    if (B_DTYPE == 0u) {
        return bitcast<vec4<f32>>(b[i >> 2u]);
    }
    let words = b[i >> 3u];
    let half = select(words.xy, words.zw, (i & 4u) != 0u);
    return vec4<f32>(two(half.x), two(half.y));
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

@compute @workgroup_size(8, 4)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_id) lid: vec3<u32>,
) {
    let group = wid.x + wid.y * nwg.x + p.first_group;
    if (group >= p.groups) {
        return;
    }
    let tiles_n = (p.n + 63u) / 64u;
    let tiles_m = (p.m + 31u) / 32u;
    let batch = group / (tiles_n * tiles_m);
    let i0 = batch / p.b1;
    let i1 = batch % p.b1;
    let row = (group / tiles_n) % tiles_m * 32u + lid.y * 8u;
    let col = group % tiles_n * 64u + lid.x * 8u;

    // Rows and columns past the edge repeat the last one and are not stored: no branch in the loop.
    var a_at = array<u32, 8>();
    var b_at = array<u32, 8>();
    let a_first = p.a_off + i0 * p.a_b0 + i1 * p.a_b1;
    let b_first = p.b_off + i0 * p.bb0 + i1 * p.bb1;
    for (var i = 0u; i < 8u; i++) {
        a_at[i] = (a_first + min(row + i, p.m - 1u) * p.a_m) >> 2u;
        b_at[i] = b_first + min(col + i, p.n - 1u) * p.b_n;
    }
    let b_col = b_first + min(col, p.n - 8u);
    let c_at = p.c_off + i0 * p.c_b0 + i1 * p.c_b1;

    var low = array<vec4<f32>, 8>(); // columns 0 .. 3 of each row
    var high = array<vec4<f32>, 8>(); // columns 4 .. 7
    if (p.carry == 1u) {
        for (var i = 0u; i < 8u; i++) {
            for (var j = 0u; j < 4u; j++) {
                let at = c_at + min(row + i, p.m - 1u) * p.c_m;
                low[i][j] = c[at + min(col + j, p.n - 1u) * p.c_n];
                high[i][j] = c[at + min(col + j + 4u, p.n - 1u) * p.c_n];
            }
        }
    }
    for (var k = 0u; k < p.k; k += 4u) {
        var lo: mat4x4<f32>; // column kk: B[k + kk, columns 0 .. 3]
        var hi: mat4x4<f32>;
        if (B_ALONG_N == 1u) {
            let at = b_col + k * p.b_k;
            lo = mat4x4<f32>(load_b(at), load_b(at + p.b_k), load_b(at + 2u * p.b_k), load_b(at + 3u * p.b_k));
            let up = at + 4u;
            hi = mat4x4<f32>(load_b(up), load_b(up + p.b_k), load_b(up + 2u * p.b_k), load_b(up + 3u * p.b_k));
        } else {
            lo = transpose(mat4x4<f32>(load_b(b_at[0] + k), load_b(b_at[1] + k), load_b(b_at[2] + k), load_b(b_at[3] + k)));
            hi = transpose(mat4x4<f32>(load_b(b_at[4] + k), load_b(b_at[5] + k), load_b(b_at[6] + k), load_b(b_at[7] + k)));
        }
        for (var i = 0u; i < 8u; i++) {
            let av = a[a_at[i] + (k >> 2u)];
            low[i] = fma(vec4<f32>(av.w), lo[3], fma(vec4<f32>(av.z), lo[2], fma(vec4<f32>(av.y), lo[1], fma(vec4<f32>(av.x), lo[0], low[i]))));
            high[i] = fma(vec4<f32>(av.w), hi[3], fma(vec4<f32>(av.z), hi[2], fma(vec4<f32>(av.y), hi[1], fma(vec4<f32>(av.x), hi[0], high[i]))));
        }
    }

    for (var i = 0u; i < 8u; i++) {
        for (var j = 0u; j < 8u; j++) {
            if (row + i < p.m && col + j < p.n) {
                var out = select(high[i][j & 3u], low[i][j & 3u], j < 4u);
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
