// dq of attention: dq = scale * sum over keys, in order, of ds * k, ds = w * (do . v - delta), w = exp(score - lse).
//
// The weights are computed again from lse, so nothing of the size of queries x keys is ever stored.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: b * h * ceil(t / 8)
    b: u32, // batch rows
    t: u32, // queries
    h: u32, // query heads
    hk: u32, // key and value heads, a divisor of h
    s: u32, // keys that k and v have room for
    d: u32, // features of a head, at most 256
    causal: u32, // 1: a query sees keys up to its own position; 0: all
    window: u32, // a query sees the last `window` keys up to its position; 0: all
    scale: f32, // factor of the scores, 1 / sqrt(d)
    q_off: u32, // first element of q
    q_b: u32, // stride of q over the batch
    q_t: u32, // stride of q over queries
    q_h: u32, // stride of q over heads
    k_off: u32, // first element of k
    k_b: u32, // stride of k over the batch
    k_t: u32, // stride of k over keys
    k_h: u32, // stride of k over heads
    v_off: u32, // first element of v
    v_b: u32, // stride of v over the batch
    v_t: u32, // stride of v over keys
    v_h: u32, // stride of v over heads
    do_off: u32, // first element of do
    do_b: u32, // stride of do over the batch
    do_t: u32, // stride of do over queries
    do_h: u32, // stride of do over heads
    dq_off: u32, // first element of dq
    dq_b: u32, // stride of dq over the batch
    dq_t: u32, // stride of dq over queries
    dq_h: u32, // stride of dq over heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>; // q [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> k: array<f32>; // k [b, s, hk, d], strided, features adjacent
@group(0) @binding(3) var<storage, read> v: array<f32>; // v [b, s, hk, d], strided, features adjacent
@group(0) @binding(4) var<storage, read> d_o: array<f32>; // do [b, t, h, d], strided, features adjacent
@group(0) @binding(5) var<storage, read> stats: array<f32>; // stats [b, h, t, 2] of attention_delta
@group(0) @binding(6) var<storage, read> rows: array<u32>; // rows [b, 2]: absolute position of the first query, number of keys
@group(0) @binding(7) var<storage, read_write> dq: array<f32>; // dq [b, t, h, d], strided, features adjacent

// ds of 8 queries and 32 keys.
var<workgroup> tile: array<f32, 256>;

// Whether the query at absolute position `position` may look at key j of a batch row with `keys` keys.
fn visible(position: u32, j: u32, keys: u32) -> bool {
    return j < keys && (p.causal == 0u || j <= position) && (p.window == 0u || j + p.window > position);
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
    let blocks = (p.t + 7u) / 8u;
    let head = group / blocks % p.h;
    let row = group / (blocks * p.h);
    let first = group % blocks * 8u;
    let slot = lane / 32u;
    let part = lane % 32u;
    let query = min(first + slot, p.t - 1u);
    let start = rows[row * 2u];
    let keys = min(rows[row * 2u + 1u], p.s);
    let position = start + query;

    var end = keys;
    if (p.causal == 1u) {
        end = min(keys, start + min(first + 7u, p.t - 1u) + 1u);
    }
    var begin = 0u;
    if (p.window > 0u && start + first + 1u > p.window) {
        begin = (start + first + 1u - p.window) / 32u;
    }

    let q_at = p.q_off + row * p.q_b + query * p.q_t + head * p.q_h;
    let do_at = p.do_off + row * p.do_b + query * p.do_t + head * p.do_h;
    let kv_head = head / (p.h / p.hk);
    let k_at = p.k_off + row * p.k_b + kv_head * p.k_h;
    let v_at = p.v_off + row * p.v_b + kv_head * p.v_h;
    let stat = ((row * p.h + head) * p.t + query) * 2u;
    let lse = stats[stat];
    let delta = stats[stat + 1u];
    var grad = array<f32, 8>();
    for (var block = begin; block * 32u < end; block++) {
        let j = block * 32u + part;
        var ds = 0.0;
        if (visible(position, j, keys)) {
            var score = 0.0;
            var dw = 0.0;
            for (var i = 0u; i < p.d; i++) {
                score = fma(q[q_at + i], k[k_at + j * p.k_t + i], score);
                dw = fma(d_o[do_at + i], v[v_at + j * p.v_t + i], dw);
            }
            ds = exp(fma(score, p.scale, -lse)) * (dw - delta) * p.scale;
        }
        workgroupBarrier();
        tile[lane] = ds;
        workgroupBarrier();
        let count = min(32u, keys - block * 32u);
        for (var r = 0u; r < 8u; r++) {
            let feature = r * 32u + part;
            if (feature < p.d) {
                for (var i = 0u; i < count; i++) {
                    grad[r] = fma(tile[slot * 32u + i], k[k_at + (block * 32u + i) * p.k_t + feature], grad[r]);
                }
            }
        }
    }
    if (first + slot < p.t) {
        let dq_at = p.dq_off + row * p.dq_b + query * p.dq_t + head * p.dq_h;
        for (var r = 0u; r < 8u; r++) {
            let feature = r * 32u + part;
            if (feature < p.d) {
                dq[dq_at + feature] = grad[r];
            }
        }
    }
}
