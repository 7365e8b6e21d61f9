// dk and dv of attention: for each key, over the query heads of its group in order, over the queries in order,
// dv += w * do and dk += ds * q: one accumulator each, so the sum over a group has a fixed order.
//
// A workgroup owns 8 keys of one key head; keys past a row's count get zeros.

struct Params {
    first_group: u32, // linear id of this dispatch's first workgroup
    groups: u32, // workgroups of the op: b * hk * ceil(s / 8)
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
    dk_off: u32, // first element of dk
    dk_b: u32, // stride of dk over the batch
    dk_t: u32, // stride of dk over keys
    dk_h: u32, // stride of dk over heads
    dv_off: u32, // first element of dv
    dv_b: u32, // stride of dv over the batch
    dv_t: u32, // stride of dv over keys
    dv_h: u32, // stride of dv over heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>; // q [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> k: array<f32>; // k [b, s, hk, d], strided, features adjacent
@group(0) @binding(3) var<storage, read> v: array<f32>; // v [b, s, hk, d], strided, features adjacent
@group(0) @binding(4) var<storage, read> d_o: array<f32>; // do [b, t, h, d], strided, features adjacent
@group(0) @binding(5) var<storage, read> stats: array<f32>; // stats [b, h, t, 2] of attention_delta
@group(0) @binding(6) var<storage, read> rows: array<u32>; // rows [b, 2]: absolute position of the first query, number of keys
@group(0) @binding(7) var<storage, read_write> dk: array<f32>; // dk [b, s, hk, d], strided, features adjacent
@group(0) @binding(8) var<storage, read_write> dv: array<f32>; // dv [b, s, hk, d], strided, features adjacent

// Weights and ds of 8 keys and 32 queries.
var<workgroup> weights: array<f32, 256>;
var<workgroup> slopes: array<f32, 256>;

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
    let blocks = (p.s + 7u) / 8u;
    let kv_head = group / blocks % p.hk;
    let row = group / (blocks * p.hk);
    let first = group % blocks * 8u;
    let slot = lane / 32u;
    let part = lane % 32u;
    let j = first + slot;
    let start = rows[row * 2u];
    let keys = min(rows[row * 2u + 1u], p.s);
    let k_at = p.k_off + row * p.k_b + j * p.k_t + kv_head * p.k_h;
    let v_at = p.v_off + row * p.v_b + j * p.v_t + kv_head * p.v_h;

    // Queries before the first key see nothing here; the same bound for the whole workgroup.
    var begin = 0u;
    if (p.causal == 1u && first > start) {
        begin = (first - start) / 32u;
    }
    var dk_acc = array<f32, 8>();
    var dv_acc = array<f32, 8>();
    let members = p.h / p.hk;
    for (var member = 0u; member < members; member++) {
        let head = kv_head * members + member;
        let q_head = p.q_off + row * p.q_b + head * p.q_h;
        let do_head = p.do_off + row * p.do_b + head * p.do_h;
        for (var block = begin; block * 32u < p.t; block++) {
            let query = block * 32u + part;
            var w = 0.0;
            var ds = 0.0;
            if (query < p.t && visible(start + query, j, keys)) {
                var score = 0.0;
                var dw = 0.0;
                for (var i = 0u; i < p.d; i++) {
                    score = fma(q[q_head + query * p.q_t + i], k[k_at + i], score);
                    dw = fma(d_o[do_head + query * p.do_t + i], v[v_at + i], dw);
                }
                let stat = ((row * p.h + head) * p.t + query) * 2u;
                w = exp(fma(score, p.scale, -stats[stat]));
                ds = w * (dw - stats[stat + 1u]) * p.scale;
            }
            workgroupBarrier();
            weights[lane] = w;
            slopes[lane] = ds;
            workgroupBarrier();
            let count = min(32u, p.t - block * 32u);
            for (var r = 0u; r < 8u; r++) {
                let feature = r * 32u + part;
                if (feature < p.d) {
                    for (var i = 0u; i < count; i++) {
                        let at = block * 32u + i;
                        dv_acc[r] = fma(weights[slot * 32u + i], d_o[do_head + at * p.do_t + feature], dv_acc[r]);
                        dk_acc[r] = fma(slopes[slot * 32u + i], q[q_head + at * p.q_t + feature], dk_acc[r]);
                    }
                }
            }
        }
    }
    if (j < p.s) {
        let dk_at = p.dk_off + row * p.dk_b + j * p.dk_t + kv_head * p.dk_h;
        let dv_at = p.dv_off + row * p.dv_b + j * p.dv_t + kv_head * p.dv_h;
        for (var r = 0u; r < 8u; r++) {
            let feature = r * 32u + part;
            if (feature < p.d) {
                dk[dk_at + feature] = dk_acc[r];
                dv[dv_at + feature] = dv_acc[r];
            }
        }
    }
}
