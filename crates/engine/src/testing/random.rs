//! Seeded choices for schedules, and the hash of the history model.

/// Mixes 64 bits so that every input bit reaches every output bit (the finaliser of SplitMix64).
pub fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Choices that repeat for a seed.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Random { state: mix(seed) }
    }

    pub fn roll(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// A number in `[low, high]`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.roll() % u64::from(high - low + 1)) as u32
    }

    /// True once in `count` times on average.
    pub fn one_in(&mut self, count: u32) -> bool {
        self.roll().is_multiple_of(u64::from(count))
    }

    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[(self.roll() % items.len() as u64) as usize]
    }
}
