//! Where n-gram rows live changes no bit: mapped, in memory, and read from the file behind caches of several sizes.

mod production;

use production::{cases, feed_all};
use tf_model::deepseek_v41::Options;
use tf_model::deepseek_v41::engram_rows::EngramPlace;

#[test]
fn a_prompt_has_the_same_bits_wherever_its_rows_lie() {
    const PLACES: [EngramPlace; 4] = [
        EngramPlace::Ram,
        EngramPlace::Disk { cache_bytes: 0 },
        EngramPlace::Disk { cache_bytes: 4 << 10 },
        EngramPlace::Disk { cache_bytes: 64 << 20 },
    ];
    let mut compared = 0;
    for case in cases() {
        let options = Options { threads: 2, slots: 3, context: 512, round_rows: 64, ..Options::default() };
        // Chunks of every kind, and rows of both layers met again.
        let bits = |place| {
            let mut model = case.load_with_engram(place, options.clone());
            [(0, 64), (1, 1), (2, 7)].map(|(slot, chunk)| feed_all(&mut model, slot, 0, &case.tokens[..90], chunk))
        };
        let mapped = bits(EngramPlace::Mapped);
        for place in PLACES {
            assert_eq!(bits(place), mapped, "{}: {place:?}", case.name);
            compared += mapped.iter().map(Vec::len).sum::<usize>();
        }
    }
    assert!(compared > 1000, "{compared} rows");
}
