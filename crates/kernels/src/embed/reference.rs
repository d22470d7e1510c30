//! The definition of `embed`: a token's row of the table, once for each residual stream.

/// `out[t][i] = table[ids[t]]` for every stream `i`. `table`: `[vocabulary, columns]`; out: `[ids, streams, columns]`.
///
/// # Panics
/// When an id is outside the table.
pub fn embed(table: &[f64], columns: usize, ids: &[u32], streams: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(ids.len() * streams * columns);
    for &id in ids {
        let row = &table[id as usize * columns..][..columns];
        for _ in 0..streams {
            out.extend_from_slice(row);
        }
    }
    out
}
