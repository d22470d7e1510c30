//! Numbers from a counter, rows that could spill over to a neighbour or lose bits, and work dealt to all cores.

use std::num::NonZero;

pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A bf16 with an exponent field in `low..=high`.
    pub(crate) fn bf16(&mut self, low: u64, high: u64) -> u16 {
        let bits = self.next();
        (bits as u16 & 0x807f) | ((low + (bits >> 32) % (high - low + 1)) as u16) << 7
    }

    /// An E4M3 code that is a number.
    pub(crate) fn e4m3(&mut self) -> u8 {
        let code = self.next() as u8;
        if code & 0x7f == 0x7f { code ^ 1 } else { code }
    }
}

/// Row `index` of the pool, bf16 bits: ordinary, widely spread, huge, zero, subnormal, cancelling, NaN, infinite, one-hot.
pub(crate) fn pool_row(index: usize, columns: usize, random: &mut Random) -> Vec<u16> {
    let mut row: Vec<u16> = match index % 8 {
        0 | 1 | 7 => (0..columns).map(|_| random.bf16(120, 128)).collect(),
        2 => (0..columns).map(|_| random.bf16(87, 167)).collect(),
        3 => (0..columns).map(|_| random.bf16(224, 228)).collect(),
        4 => vec![0; columns],
        5 => (0..columns).map(|_| random.bf16(0, 2)).collect(),
        _ => (0..columns).map(|i| [0x3f80, 0xbf80][i / 16 % 2]).collect(),
    };
    let at = random.below(columns as u64) as usize;
    match index {
        9 => row.fill(0x7fc0),
        11 => row[at] = 0x7f80,
        12 => row[at] = 0x3f80,
        13 => row[at] = 0x7fff,
        19 => row.fill(0xff80),
        _ => {}
    }
    row
}

pub(crate) fn in_parallel<T: Send + Default + Clone>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut results = vec![T::default(); count];
    let share = count.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, results) in results.chunks_mut(share).enumerate() {
            let work = &work;
            scope.spawn(move || {
                for (index, result) in results.iter_mut().enumerate() {
                    *result = work(part * share + index);
                }
            });
        }
    });
    results
}

/// How many outputs were compared and differed, with the first difference.
#[derive(Default)]
pub(crate) struct Tally {
    pub compared: u64,
    pub bad: u64,
    pub first: Option<String>,
}

impl Tally {
    /// Equal bits, or both NaN: the payload of a NaN is not part of the definition.
    pub(crate) fn add(&mut self, found: f32, expected: f32, place: impl Fn() -> String) {
        self.compared += 1;
        if found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan()) {
            self.bad += 1;
            self.first.get_or_insert_with(|| {
                format!("{}: {:#010x}, expected {:#010x}", place(), found.to_bits(), expected.to_bits())
            });
        }
    }

    /// Rows of outputs side by side; `place` gets row and column.
    pub(crate) fn add_rows(
        &mut self,
        found: &[f32],
        expected: &[f32],
        width: usize,
        place: impl Fn(usize, usize) -> String,
    ) {
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            self.add(*found, *expected, || place(index / width, index % width));
        }
    }
}
