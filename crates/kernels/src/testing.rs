//! What the families' tests share: seeded values, levels and thread counts, and bit comparison.

use tf_device::{Buffer, Device, Element, Queue};
use tf_numerics::lanes::Level;

/// Seeded values for tests.
pub(crate) struct Values(u64);

impl Values {
    pub fn new(seed: u64) -> Values {
        Values(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    pub fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// Uniform in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        self.next() as i32 as f32 / 2147483648.0
    }

    /// `count` values in [-scale, scale).
    pub fn uniform(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.unit() * scale).collect()
    }

    /// `count` bf16 values in [-scale, scale].
    pub fn bf16(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| tf_numerics::bf16::round(self.unit() * scale)).collect()
    }

    /// Values over 20 binades, so that cancellation and absorption both occur.
    pub fn spread(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let bits = self.next();
                f32::from_bits(bits & 0x807f_ffff | (117 + self.below(20)) << 23)
            })
            .collect()
    }

    /// Values that no neighbour may notice.
    pub fn poison(&mut self) -> f32 {
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 3e38][self.below(5) as usize]
    }
}

pub(crate) fn device<T: Element>(values: &[T]) -> Buffer {
    Buffer::from_slice(&Device::cpu(), values).expect("a test's buffer fits")
}

/// A buffer of `count` values that no kernel may leave where it promised to write.
pub(crate) fn dirty(count: usize) -> Buffer {
    device(&vec![f32::NAN; count])
}

/// One queue for each available level and 1 to 3 threads.
pub(crate) fn queues() -> Vec<(String, Queue)> {
    let mut queues = Vec::new();
    for level in Level::available() {
        for threads in 1..=3 {
            queues.push((format!("{level}, {threads} threads"), Queue::cpu(threads, level)));
        }
    }
    queues
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    // A NaN's sign and payload are nobody's promise.
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// Runs `case` on every queue; all results must have equal bits. Returns them.
pub(crate) fn on_all_queues(mut case: impl FnMut(&mut Queue) -> Vec<f32>) -> Vec<f32> {
    let mut first: Option<Vec<f32>> = None;
    for (name, mut queue) in queues() {
        let got = case(&mut queue);
        match &first {
            None => first = Some(got),
            Some(first) => assert_eq!(bits(&got), bits(first), "{name}"),
        }
    }
    first.expect("there is a queue")
}

/// Asserts `|got - wanted| <= bound` for every element; the worst one is named.
pub(crate) fn assert_close(got: &[f32], wanted: &[f64], bounds: &[f64]) {
    assert_eq!(got.len(), wanted.len());
    assert_eq!(got.len(), bounds.len());
    let mut worst = (0.0, 0);
    for (i, ((&got, &wanted), &bound)) in got.iter().zip(wanted).zip(bounds).enumerate() {
        let excess = (f64::from(got) - wanted).abs() / bound.max(f64::MIN_POSITIVE);
        if excess > worst.0 || excess.is_nan() {
            worst = (excess, i);
        }
    }
    let (excess, i) = worst;
    assert!(excess <= 1.0, "element {i}: {} instead of {}, bound {}", got[i], wanted[i], bounds[i]);
}

/// Half a unit in the last place of bf16, relative; and of float32.
pub(crate) const BF16_HALF_ULP: f64 = 1.0 / 256.0;
pub(crate) const F32_HALF_ULP: f64 = 1.0 / 16777216.0;

/// A tensor of `tests/golden/units.safetensors`, numbers of any type as float64.
pub(crate) fn golden(name: &str) -> Vec<f64> {
    const FILE: &[u8] = include_bytes!("../tests/golden/units.safetensors");
    let header_bytes = u64::from_le_bytes(FILE[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&FILE[8..8 + header_bytes]).expect("a JSON header");
    let entry = &header[name];
    let offset = |i: usize| entry["data_offsets"][i].as_u64().expect("an offset") as usize;
    let data = &FILE[8 + header_bytes..][offset(0)..offset(1)];
    match entry["dtype"].as_str().expect("a dtype") {
        "F32" => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        "I64" => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
        "U8" => data.iter().map(|&b| f64::from(b)).collect(),
        other => panic!("{name} is {other}"),
    }
}

pub(crate) fn narrow(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|v| v as f32).collect()
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}
