// stats[b,h,t] = (lse, delta), delta = sum over features of do * o: what both backward kernels need of a query.
//
// One array for both keeps attention_dkv within WebGPU's 8 storage bindings.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(b * h * t / 256)
    b: u32, // batch rows
    t: u32, // queries
    h: u32, // query heads
    d: u32, // features of a head
    o_off: u32, // first element of o
    o_b: u32, // stride of o over the batch
    o_t: u32, // stride of o over queries
    o_h: u32, // stride of o over heads
    do_off: u32, // first element of do
    do_b: u32, // stride of do over the batch
    do_t: u32, // stride of do over queries
    do_h: u32, // stride of do over heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> o: array<f32>; // o [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> d_o: array<f32>; // do [b, t, h, d], strided, features adjacent
@group(0) @binding(3) var<storage, read> lse: array<f32>; // lse [b, h, t] of attention
@group(0) @binding(4) var<storage, read_write> stats: array<f32>; // stats [b, h, t, 2]: lse, delta

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
    let at = group * 256u + lane;
    if (at >= p.b * p.h * p.t) {
        return;
    }
    let query = at % p.t;
    let head = at / p.t % p.h;
    let row = at / (p.t * p.h);
    let o_at = p.o_off + row * p.o_b + query * p.o_t + head * p.o_h;
    let do_at = p.do_off + row * p.do_b + query * p.do_t + head * p.do_h;
    var delta = 0.0;
    for (var i = 0u; i < p.d; i++) {
        delta = fma(d_o[do_at + i], o[o_at + i], delta);
    }
    stats[at * 2u] = lse[at];
    stats[at * 2u + 1u] = delta;
}
