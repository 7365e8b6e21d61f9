// out[i] = f(a, b, c), dense row-major output of rank 0 to 6, inputs strided (stride 0 broadcasts).
//
// Casts, transposes, slices, broadcasts and concatenation are COPY and CONCAT2 of the same kernel. Each thread writes four
// consecutive elements: whole words of f16 and bf16 too, so no two threads share a word.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(n / 1024)
    n: u32, // elements of the output
    rank: u32, // dimensions of the output, 0 to 6
    a_off: u32, // first element of a
    b_off: u32, // first element of b
    c_off: u32, // first element of c
    axis: u32, // CONCAT2: the dimension along which a and b are joined
    split: u32, // CONCAT2: size of a along the axis
    scalar: f32, // SCALE, ADD_SCALAR: the number
    shape: array<vec4<u32>, 2>, // output dimensions, outermost first, dimension d at [d / 4][d % 4]
    a_stride: array<vec4<u32>, 2>, // strides of a over the output's dimensions
    b_stride: array<vec4<u32>, 2>, // strides of b
    c_stride: array<vec4<u32>, 2>, // strides of c
}

const OP_COPY: u32 = 0u; // a, cast to the output's dtype; same dtype: the same bits
const OP_ADD: u32 = 1u; // a + b
const OP_SUB: u32 = 2u; // a - b
const OP_MUL: u32 = 3u; // a * b
const OP_DIV: u32 = 4u; // a / b
const OP_MIN: u32 = 5u; // the smaller of a and b
const OP_MAX: u32 = 6u; // the larger of a and b
const OP_POW: u32 = 7u; // a to the b; where a is negative b must be integral
const OP_NEG: u32 = 8u; // -a
const OP_ABS: u32 = 9u; // |a|
const OP_EXP: u32 = 10u; // e to the a
const OP_LOG: u32 = 11u; // natural logarithm
const OP_SQRT: u32 = 12u; // square root
const OP_RSQRT: u32 = 13u; // 1 / square root
const OP_RECIP: u32 = 14u; // 1 / a
const OP_TANH: u32 = 15u; // hyperbolic tangent
const OP_SIGMOID: u32 = 16u; // 1 / (1 + exp(-a))
const OP_RELU: u32 = 17u; // max(a, 0)
const OP_SILU: u32 = 18u; // a * sigmoid(a)
const OP_GELU_ERF: u32 = 19u; // a * Phi(a), exact form
const OP_GELU_TANH: u32 = 20u; // the tanh approximation of gelu
const OP_SIN: u32 = 21u; // sine, |a| at most pi
const OP_COS: u32 = 22u; // cosine, |a| at most pi
const OP_LT: u32 = 23u; // a < b ? 1 : 0
const OP_LE: u32 = 24u; // a <= b ? 1 : 0
const OP_EQ: u32 = 25u; // a == b ? 1 : 0
const OP_SELECT: u32 = 26u; // c != 0 ? a : b
const OP_SCALE: u32 = 27u; // a * scalar
const OP_ADD_SCALAR: u32 = 28u; // a + scalar
const OP_TANH_GRAD: u32 = 29u; // a = y, b = dy: dy * (1 - y * y)
const OP_SIGMOID_GRAD: u32 = 30u; // a = y, b = dy: dy * y * (1 - y)
const OP_RELU_GRAD: u32 = 31u; // a = x, b = dy: x > 0 ? dy : 0
const OP_SILU_GRAD: u32 = 32u; // a = x, b = dy
const OP_GELU_ERF_GRAD: u32 = 33u; // a = x, b = dy
const OP_GELU_TANH_GRAD: u32 = 34u; // a = x, b = dy
const OP_CONCAT2: u32 = 35u; // a, then b, along one dimension

override OP: u32 = 0u;
// Dtypes: 0 f32, 1 f16, 2 bf16, 3 i32; inputs also 4 u8, 5 i64 (its low word). Arithmetic on integers goes through f32.
override A_DTYPE: u32 = 0u;
override B_DTYPE: u32 = 0u;
override C_DTYPE: u32 = 0u;
override OUT_DTYPE: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<u32>; // a, strided over shape, A_DTYPE
@group(0) @binding(2) var<storage, read> b: array<u32>; // b, strided over shape, B_DTYPE; a again where unused
@group(0) @binding(3) var<storage, read> c: array<u32>; // c, strided over shape, C_DTYPE; a again where unused
@group(0) @binding(4) var<storage, read_write> out: array<u32>; // out [shape], dense, OUT_DTYPE; 16-bit: the last word is padded with 0

// The word that holds element i, and the element's own bits moved to the bottom.
fn word_of(i: u32, dtype: u32) -> u32 {
    if (dtype == 1u || dtype == 2u) {
        return i >> 1u;
    }
    if (dtype == 4u) {
        return i >> 2u;
    }
    return select(i, i * 2u, dtype == 5u);
}

fn own_bits(word: u32, i: u32, dtype: u32) -> u32 {
    if (dtype == 1u || dtype == 2u) {
        return (word >> (16u * (i & 1u))) & 0xffffu;
    }
    if (dtype == 4u) {
        return (word >> (8u * (i & 3u))) & 0xffu;
    }
    return word;
}

// Integer arithmetic only: unpack2x16float may flush subnormals and drop NaN payloads.
fn f16_to_f32(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13u);
    }
    if (magnitude >= 0x400u) {
        return sign | ((magnitude << 13u) + 0x38000000u);
    }
    // A subnormal half is a normal float: its magnitude times 2^-24.
    return sign | bitcast<u32>(f32(magnitude) * 5.9604644775390625e-8);
}

// Round to nearest even on the bits: the rounding of pack2x16float is the implementation's choice.
fn f32_to_f16(bits: u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u | ((magnitude >> 13u) & 0x3ffu);
    }
    if (magnitude >= 0x477ff000u) {
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) {
        return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13u) & 1u)) >> 13u);
    }
    if (magnitude <= 0x33000000u) {
        return sign;
    }
    let shift = 126u - (magnitude >> 23u);
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let kept = mantissa >> shift;
    let rest = mantissa & ((1u << shift) - 1u);
    let tie = 1u << (shift - 1u);
    return sign | (kept + select(0u, 1u, rest > tie || (rest == tie && (kept & 1u) == 1u)));
}

fn f32_to_bf16(bits: u32) -> u32 {
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// An element's bits → the bits of its value as f32.
fn widen(bits: u32, dtype: u32) -> u32 {
    switch (dtype) {
        case 1u: { return f16_to_f32(bits); }
        case 2u: { return bits << 16u; }
        case 3u, 5u: { return bitcast<u32>(f32(bitcast<i32>(bits))); }
        case 4u: { return bitcast<u32>(f32(bits)); }
        default: { return bits; }
    }
}

// The bits of an f32 → bits of the output's dtype.
fn narrow(bits: u32) -> u32 {
    switch (OUT_DTYPE) {
        case 1u: { return f32_to_f16(bits); }
        case 2u: { return f32_to_bf16(bits); }
        case 3u: { return bitcast<u32>(i32(bitcast<f32>(bits))); }
        default: { return bits; }
    }
}

fn convert(bits: u32, dtype: u32) -> u32 {
    // Equal dtypes and integers pass untouched: a cast through f32 would lose integers above 2^24 and NaN payloads.
    if (dtype == OUT_DTYPE || (OUT_DTYPE == 3u && (dtype == 4u || dtype == 5u))) {
        return bits;
    }
    return narrow(widen(bits, dtype));
}

fn a_bits(i: u32) -> u32 {
    return own_bits(a[word_of(i, A_DTYPE)], i, A_DTYPE);
}

fn b_bits(i: u32) -> u32 {
    return own_bits(b[word_of(i, B_DTYPE)], i, B_DTYPE);
}

fn c_value(i: u32) -> f32 {
    return bitcast<f32>(widen(own_bits(c[word_of(i, C_DTYPE)], i, C_DTYPE), C_DTYPE));
}

fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(e, 1.0, x >= 0.0) / (1.0 + e);
}

// The built-in overflows for large arguments on some backends and loses small ones on others.
fn tanh_safe(x: f32) -> f32 {
    let z = abs(x);
    if (z < 0.25) {
        let s = x * x;
        return x * fma(s, fma(s, fma(s, fma(s, 0.021869488, -0.053968254), 0.13333333), -0.33333333), 1.0);
    }
    let e = exp(-2.0 * z);
    return select(-1.0, 1.0, x > 0.0) * ((1.0 - e) / (1.0 + e));
}

// Phi(x), the normal distribution function. erfc(z) = exp(-z z) t P(t), t = 1 / (1 + z / 2): P interpolates the scaled
// complementary error function at 11 Chebyshev nodes for z up to 9.5 (error 5e-9, own fit).
fn normal_cdf(x: f32) -> f32 {
    let z = min(abs(x) * 0.70710678, 9.5);
    let t = 1.0 / fma(0.5, z, 1.0);
    var s = 0.03118522525;
    s = fma(s, t, -0.16429426573);
    s = fma(s, t, 0.31311419951);
    s = fma(s, t, -0.18923996032);
    s = fma(s, t, -0.11563755921);
    s = fma(s, t, 0.09332045659);
    s = fma(s, t, 0.03092144051);
    s = fma(s, t, 0.19212705349);
    s = fma(s, t, 0.24405780025);
    s = fma(s, t, 0.28236167772);
    s = fma(s, t, 0.28208393376);
    let tail = 0.5 * t * s * exp(-z * z);
    return select(tail, 1.0 - tail, x > 0.0);
}

// The built-in is exp2(y log2(x)): undefined for negative x, and left to the implementation at zero.
fn power(x: f32, y: f32) -> f32 {
    if (y == 0.0) {
        return 1.0;
    }
    if (x == 0.0 && y > 0.0) {
        return 0.0;
    }
    let size = pow(abs(x), y);
    let odd = fract(abs(y) * 0.5) == 0.5;
    return select(size, -size, x < 0.0 && odd);
}

fn gelu_inner(x: f32) -> f32 {
    return 0.79788456 * fma(0.044715 * x * x, x, x);
}

fn apply(x: f32, y: f32) -> f32 {
    switch (OP) {
        case OP_ADD: { return x + y; }
        case OP_SUB: { return x - y; }
        case OP_MUL: { return x * y; }
        case OP_DIV: { return x / y; }
        case OP_MIN: { return min(x, y); }
        case OP_MAX: { return max(x, y); }
        case OP_POW: { return power(x, y); }
        case OP_NEG: { return -x; }
        case OP_ABS: { return abs(x); }
        case OP_EXP: { return exp(x); }
        case OP_LOG: { return log(x); }
        case OP_SQRT: { return sqrt(x); }
        case OP_RSQRT: { return inverseSqrt(x); }
        case OP_RECIP: { return 1.0 / x; }
        case OP_TANH: { return tanh_safe(x); }
        case OP_SIGMOID: { return sigmoid(x); }
        case OP_RELU: { return max(x, 0.0); }
        case OP_SILU: { return x * sigmoid(x); }
        case OP_GELU_ERF: { return x * normal_cdf(x); }
        case OP_GELU_TANH: { return 0.5 * x * (1.0 + tanh_safe(gelu_inner(x))); }
        case OP_SIN: { return sin(x); }
        case OP_COS: { return cos(x); }
        case OP_LT: { return select(0.0, 1.0, x < y); }
        case OP_LE: { return select(0.0, 1.0, x <= y); }
        case OP_EQ: { return select(0.0, 1.0, x == y); }
        case OP_SCALE: { return x * p.scalar; }
        case OP_ADD_SCALAR: { return x + p.scalar; }
        case OP_TANH_GRAD: { return y * fma(-x, x, 1.0); }
        case OP_SIGMOID_GRAD: { return y * (x * (1.0 - x)); }
        case OP_RELU_GRAD: { return select(0.0, y, x > 0.0); }
        case OP_SILU_GRAD: {
            let s = sigmoid(x);
            return y * (s * fma(x, 1.0 - s, 1.0));
        }
        case OP_GELU_ERF_GRAD: { return y * fma(x * 0.39894228, exp(-0.5 * x * x), normal_cdf(x)); }
        case OP_GELU_TANH_GRAD: {
            let t = tanh_safe(gelu_inner(x));
            let slope = 0.79788456 * fma(3.0 * 0.044715 * x, x, 1.0);
            return y * fma(0.5 * x * fma(-t, t, 1.0), slope, 0.5 * (1.0 + t));
        }
        default: { return x; }
    }
}

// Output element `at` as bits of OUT_DTYPE.
fn element(at: u32) -> u32 {
    var rest = at;
    var a_at = p.a_off;
    var b_at = p.b_off;
    var c_at = p.c_off;
    var in_b = false;
    for (var left = p.rank; left > 0u; left--) {
        let d = left - 1u;
        let size = p.shape[d / 4u][d % 4u];
        let i = rest % size;
        rest /= size;
        var b_i = i;
        if (OP == OP_CONCAT2 && d == p.axis) {
            in_b = i >= p.split;
            b_i = i - p.split;
        }
        a_at += i * p.a_stride[d / 4u][d % 4u];
        b_at += b_i * p.b_stride[d / 4u][d % 4u];
        c_at += i * p.c_stride[d / 4u][d % 4u];
    }
    if (OP == OP_COPY) {
        return convert(a_bits(a_at), A_DTYPE);
    }
    if (OP == OP_CONCAT2) {
        if (in_b) {
            return convert(b_bits(b_at), B_DTYPE);
        }
        return convert(a_bits(a_at), A_DTYPE);
    }
    if (OP == OP_SELECT) {
        if (c_value(c_at) != 0.0) {
            return convert(a_bits(a_at), A_DTYPE);
        }
        return convert(b_bits(b_at), B_DTYPE);
    }
    let x = bitcast<f32>(widen(a_bits(a_at), A_DTYPE));
    let y = bitcast<f32>(widen(b_bits(b_at), B_DTYPE));
    return narrow(bitcast<u32>(apply(x, y)));
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
    let start = group * 1024u + lane * 4u;
    if (OUT_DTYPE == 1u || OUT_DTYPE == 2u) {
        for (var at = start; at < min(start + 4u, p.n); at += 2u) {
            var word = element(at);
            if (at + 1u < p.n) {
                word |= element(at + 1u) << 16u;
            }
            out[at / 2u] = word;
        }
    } else {
        for (var at = start; at < min(start + 4u, p.n); at++) {
            out[at] = element(at);
        }
    }
}
