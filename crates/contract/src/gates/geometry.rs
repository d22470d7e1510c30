//! Gate 2: does the launch matter? Each row's bits are compared with those it has among all rows in order.

use crate::probe::{Failure, Probe, compare_rows};
use tf_kernels::contract::Pick;

/// Row counts of a launch: small ones, and both sides of every power of two that a tile could have.
pub const ROW_COUNTS: &[usize] = &[1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128];
/// Sizes of pieces that all rows are cut into.
const CHUNKS: &[usize] = &[3, 7, 50];

pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let all = probe.all_rows();
    let target = probe.queues.target.clone();
    let settings = target.settings();
    let base = probe.launch(target.plain(), &all)?.rows;
    for (index, (what, picks)) in launches(all.len()).into_iter().enumerate() {
        // Every launch meets other levels and thread counts; all rows at once meet all of them.
        let chosen = if what == "all rows" { &settings[..] } else { &settings[index % settings.len()..][..1] };
        for setting in chosen {
            let got = probe.launch(*setting, &picks)?.rows;
            let what = format!("{what} ({})", target.name(*setting));
            compare_rows(&picks, &got, &base, &what, &mut probe.tally)?;
        }
    }
    Ok(())
}

/// The launches that rows must not notice, by name.
pub fn launches(rows: usize) -> Vec<(String, Vec<Pick>)> {
    let range = |from: usize, count: usize| (from..from + count).map(Pick::Row).collect::<Vec<_>>();
    let mut launches = vec![("all rows".to_owned(), range(0, rows))];
    for row in 0..rows {
        launches.push((format!("row {row} alone"), range(row, 1)));
    }
    for &count in ROW_COUNTS.iter().filter(|count| **count <= rows) {
        let from = count * 7 % (rows - count + 1);
        launches.push((format!("{count} rows from {from} on"), range(from, count)));
    }
    for &chunk in CHUNKS {
        for from in (0..rows).step_by(chunk) {
            launches.push((format!("a piece of {chunk} from {from} on"), range(from, chunk.min(rows - from))));
        }
    }
    let mut reversed = range(0, rows);
    reversed.reverse();
    launches.push(("reversed".to_owned(), reversed));
    let stride = (1..).map(|i| 2 * i + 35).find(|stride| gcd(*stride, rows) == 1).expect("some stride fits");
    launches.push(("shuffled".to_owned(), (0..rows).map(|i| Pick::Row(i * stride % rows)).collect()));
    for kind in 0..Pick::POISON_KINDS {
        let poison = Pick::Poison(kind);
        let (a, b) = (Pick::Row(kind % rows), Pick::Row((kind + 1) % rows));
        launches.push((format!("beside poison {kind}"), vec![poison, a, poison, b, poison]));
        let mut picks = Vec::new();
        for row in 0..rows.min(40) {
            picks.push(Pick::Row(row));
            if row % 3 == 2 {
                picks.push(Pick::Poison(kind));
            }
        }
        picks.push(poison);
        launches.push((format!("among poison {kind}"), picks));
    }
    let (first, last) = (Pick::Row(0), Pick::Row(rows - 1));
    let middle = Pick::Row(rows / 2);
    launches.push(("twins".to_owned(), vec![first, last, first, first, middle, last]));
    launches.push(("twins again".to_owned(), vec![middle; 5]));
    launches
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_order_and_neighbour_is_among_the_launches() {
        let launches = launches(128);
        for count in ROW_COUNTS {
            assert!(launches.iter().any(|(_, picks)| picks.len() == *count), "{count} rows");
        }
        for row in 0..128 {
            assert!(launches.iter().any(|(_, picks)| picks == &[Pick::Row(row)]), "row {row} alone");
        }
        for kind in 0..Pick::POISON_KINDS {
            assert!(launches.iter().any(|(_, picks)| picks.contains(&Pick::Poison(kind))));
        }
        let shuffled = &launches.iter().find(|(what, _)| what == "shuffled").unwrap().1;
        let mut rows: Vec<_> = shuffled.iter().filter_map(|pick| pick.row()).collect();
        assert_ne!(rows, (0..128).collect::<Vec<_>>());
        rows.sort_unstable();
        assert_eq!(rows, (0..128).collect::<Vec<_>>());
        for rows in 1..10 {
            let launches = super::launches(rows);
            assert!(launches.iter().flat_map(|(_, picks)| picks).all(|pick| pick.row().is_none_or(|row| row < rows)));
        }
    }
}
