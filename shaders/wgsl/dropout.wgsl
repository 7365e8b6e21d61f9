// y = x / (1 - probability) where the element's random word is at least `threshold`, else 0: forward, and backward on dy.
//
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words a call, a pure function of
// key (seed, site) and counter (feature / 4, position, row id, optimizer step). So the mask does not depend on bucket,
// micro-batch, recompute or resume.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: ceil(b * t * ceil(n / 4) / 256)
    b: u32, // batch rows
    t: u32, // positions of a row
    n: u32, // features of a position
    seed: u32, // seed of the run
    site: u32, // which dropout: layer and place in it
    first_position: u32, // position of a row's first entry
    threshold: u32, // probability * 2^32: smaller random words drop
    scale: f32, // 1 / (1 - probability)
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // x [b, t, n]
@group(0) @binding(2) var<storage, read> ids: array<u32>; // row ids [b]
@group(0) @binding(3) var<storage, read> step: array<u32>; // optimizer step [1]: an input, since parameters are written once
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // y [b, t, n]

// High word of a product: WGSL has no 64-bit integer.
fn high(a: u32, b: u32) -> u32 {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let middle = ah * bl + ((al * bl) >> 16u);
    let carry = (middle & 0xffffu) + al * bh;
    return ah * bh + (middle >> 16u) + (carry >> 16u);
}

fn philox(counter: vec4<u32>, start: vec2<u32>) -> vec4<u32> {
    var c = counter;
    var key = start;
    for (var round = 0u; round < 10u; round++) {
        let h0 = high(0xd2511f53u, c.x);
        let h1 = high(0xcd9e8d57u, c.z);
        c = vec4<u32>(h1 ^ c.y ^ key.x, 0xcd9e8d57u * c.z, h0 ^ c.w ^ key.y, 0xd2511f53u * c.x);
        key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return c;
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
    let quads = (p.n + 3u) / 4u;
    let index = group * 256u + lane;
    if (index >= p.b * p.t * quads) {
        return;
    }
    let quad = index % quads;
    let token = index / quads;
    let counter = vec4<u32>(quad, p.first_position + token % p.t, ids[token / p.t], step[0]);
    let random = philox(counter, vec2<u32>(p.seed, p.site));
    for (var i = 0u; i < min(4u, p.n - quad * 4u); i++) {
        let at = token * p.n + quad * 4u + i;
        y[at] = select(0.0, x[at] * p.scale, random[i] >= p.threshold);
    }
}
