// o = softmax(scale * q k^T, masked) v with grouped heads, and lse, the logarithm of each softmax's denominator.
//
// Online softmax over ascending tiles of 32 keys, anchored at key 0: the tile and the order of its steps define the op, so the
// same bits come out of prefill and of decode with a KV cache of the same content. A query's score is one accumulator over
// ascending features; the denominator and each output are one accumulator over ascending keys. A tile of which nothing is
// visible multiplies by 1 and adds 0, so skipping it changes nothing. Keys past a row's count are never read.

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
    o_off: u32, // first element of o
    o_b: u32, // stride of o over the batch
    o_t: u32, // stride of o over queries
    o_h: u32, // stride of o over heads
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>; // q [b, t, h, d], strided, features adjacent
@group(0) @binding(2) var<storage, read> k: array<f32>; // k [b, s, hk, d], strided, features adjacent
@group(0) @binding(3) var<storage, read> v: array<f32>; // v [b, s, hk, d], strided, features adjacent
@group(0) @binding(4) var<storage, read> rows: array<u32>; // rows [b, 2]: absolute position of the first query, number of keys
@group(0) @binding(5) var<storage, read_write> o: array<f32>; // o [b, t, h, d], strided, features adjacent
@group(0) @binding(6) var<storage, read_write> lse: array<f32>; // lse [b, h, t]

// 8 queries of 32 keys each: scores, then weights.
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

    // Tiles that any of the eight queries sees; the same for the whole workgroup.
    var end = keys;
    if (p.causal == 1u) {
        end = min(keys, start + min(first + 7u, p.t - 1u) + 1u);
    }
    var begin = 0u;
    if (p.window > 0u && start + first + 1u > p.window) {
        begin = (start + first + 1u - p.window) / 32u;
    }

    let q_at = p.q_off + row * p.q_b + query * p.q_t + head * p.q_h;
    let kv_head = head / (p.h / p.hk);
    let k_at = p.k_off + row * p.k_b + kv_head * p.k_h;
    let v_at = p.v_off + row * p.v_b + kv_head * p.v_h;
    var out = array<f32, 8>();
    // Far below any score, but finite: WGSL compilers may assume that there is no infinity.
    var largest = -1e30;
    var sum = 0.0;
    for (var block = begin; block * 32u < end; block++) {
        let j = block * 32u + part;
        let seen = visible(position, j, keys);
        var score = -1e30;
        if (seen) {
            var acc = 0.0;
            let at = k_at + j * p.k_t;
            for (var i = 0u; i < p.d; i++) {
                acc = fma(q[q_at + i], k[at + i], acc);
            }
            score = acc * p.scale;
        }
        workgroupBarrier();
        tile[lane] = score;
        workgroupBarrier();
        var raised = largest;
        for (var i = 0u; i < 32u; i++) {
            raised = max(raised, tile[slot * 32u + i]);
        }
        let shrink = exp(largest - raised);
        largest = raised;
        workgroupBarrier();
        tile[lane] = select(0.0, exp(score - raised), seen);
        workgroupBarrier();
        sum = fma(sum, shrink, tile[slot * 32u]);
        for (var i = 1u; i < 32u; i++) {
            sum += tile[slot * 32u + i];
        }
        let count = min(32u, keys - block * 32u);
        for (var r = 0u; r < 8u; r++) {
            let feature = r * 32u + part;
            if (feature < p.d) {
                var acc = out[r] * shrink;
                for (var i = 0u; i < count; i++) {
                    acc = fma(tile[slot * 32u + i], v[v_at + (block * 32u + i) * p.v_t + feature], acc);
                }
                out[r] = acc;
            }
        }
    }

    if (first + slot < p.t) {
        let empty = sum == 0.0;
        let o_at = p.o_off + row * p.o_b + query * p.o_t + head * p.o_h;
        for (var r = 0u; r < 8u; r++) {
            let feature = r * 32u + part;
            if (feature < p.d) {
                o[o_at + feature] = select(out[r] / sum, 0.0, empty);
            }
        }
        if (part == 0u) {
            lse[(row * p.h + head) * p.t + query] = select(largest + log(sum), 0.0, empty);
        }
    }
}
