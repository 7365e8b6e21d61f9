// Rotary embedding of x [b, t, h, d]: pairs of the first 2 * half features turn by the angles of the host's tables.
//
// The tables come from the host in f64 precision: WGSL promises its sine on [-pi, pi] only. Features behind 2 * half pass.
// `inverse` turns back: the gradient.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(b * t * h * d / 1024)
    b: u32, // batch rows
    t: u32, // positions
    h: u32, // heads
    d: u32, // features of a head
    half: u32, // rotated pairs, at most d / 2
    inverse: u32, // 1: turn by the negative angle
    x_off: u32, // first element of x
    x_b: u32, // stride of x over the batch
    x_t: u32, // stride of x over positions
    x_h: u32, // stride of x over heads
    y_off: u32, // first element of y
    y_b: u32, // stride of y over the batch
    y_t: u32, // stride of y over positions
    y_h: u32, // stride of y over heads
    tab_off: u32, // first element of both tables: half * the first position
    tab_b: u32, // stride of the tables over the batch, 0 where all rows share positions
    tab_t: u32, // stride of the tables over positions: half
}

// 0: pairs (i, i + half); 1: pairs (2 i, 2 i + 1).
override INTERLEAVED: u32 = 0u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> cosines: array<f32>; // cosines [positions, half]
@group(0) @binding(3) var<storage, read> sines: array<f32>; // sines [positions, half]
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // y [b, t, h, d], strided, features adjacent

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
    for (var step = 0u; step < 4u; step++) {
        let index = group * 1024u + step * 256u + lane;
        if (index >= p.b * p.t * p.h * p.d) {
            return;
        }
        let i = index % p.d;
        let head = index / p.d % p.h;
        let position = index / (p.d * p.h) % p.t;
        let row = index / (p.d * p.h * p.t);
        let source = p.x_off + row * p.x_b + position * p.x_t + head * p.x_h;
        var turned = x[source + i];
        if (i < 2u * p.half) {
            var pair = i % p.half;
            var second = i >= p.half;
            var other = select(i + p.half, i - p.half, second);
            if (INTERLEAVED == 1u) {
                pair = i / 2u;
                second = i % 2u == 1u;
                other = i ^ 1u;
            }
            let tab = p.tab_off + row * p.tab_b + position * p.tab_t + pair;
            // First of the pair: x c - other s; second: x c + other s.
            let s = select(-sines[tab], sines[tab], second != (p.inverse == 1u));
            turned = fma(turned, cosines[tab], x[source + other] * s);
        }
        y[p.y_off + row * p.y_b + position * p.y_t + head * p.y_h + i] = turned;
    }
}
