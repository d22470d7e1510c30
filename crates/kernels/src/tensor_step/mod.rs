//! `tensor_step`: whether this GPU's tensor-core step is [`tf_numerics::fma16`], on which the exactness of every CUDA linear
//! stands. Other generations of GPUs compute another function, so it is asked on every one that the program meets.

use std::num::NonZero;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, Device, LaunchError};
use tf_numerics::fma16;

static PROGRAM: Program = crate::gpu::program("tensor_step.probe", None, true);

/// Rows, columns and products of a step.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
const STEP: usize = 16;

/// What a probe has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub compared: usize,
    pub differ: usize,
    /// The first output that differs.
    pub first: Option<String>,
}

/// Runs `tiles` tiles of `steps` chained steps over operands of every exponent, zeros, infinities and NaNs, and compares
/// each output with the emulator, bit for bit (a NaN is a NaN).
///
/// # Errors
/// [`LaunchError::NoKernel`] on a device that is not CUDA; [`LaunchError::Device`].
pub fn probe(queue: &mut GpuQueue, tiles: usize, steps: usize, seed: u64) -> Result<Found, LaunchError> {
    let device = Device::Gpu(tf_device::gpu::GpuDevice::new(queue.driver().clone()));
    let inputs = Inputs::new(tiles, steps, seed);
    let (a, b) = (Buffer::from_slice(&device, &inputs.a)?, Buffer::from_slice(&device, &inputs.b)?);
    let c = Buffer::from_slice(&device, &inputs.c)?;
    let mut d = Buffer::from_slice(&device, &vec![f32::MAX; inputs.c.len()])?;
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "tensor_step_probe",
        bindings: &mut [Binding::Read(&a), Binding::Read(&b), Binding::Read(&c), Binding::Write(&mut d)],
        shape: ShapeBytes::new().uint(tiles).uint(steps).bytes(),
        groups: tiles.div_ceil(4) as u32,
        threads: 128,
        shared_bytes: 0,
    })?;
    let found: Vec<f32> = d.to_vec()?;
    Ok(inputs.compare(&found))
}

struct Inputs {
    steps: usize,
    /// `[tiles, 16, steps * 16]`, `[tiles, 8, steps * 16]` bf16, `[tiles, 16, 8]`.
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
}

impl Inputs {
    fn new(tiles: usize, steps: usize, seed: u64) -> Inputs {
        let mut random = Random(seed ^ steps as u64);
        let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
        for tile in 0..tiles {
            random.operand(&mut a, ROWS, steps * STEP, tile);
            random.operand(&mut b, COLUMNS, steps * STEP, tile / 6);
            c.extend((0..ROWS * COLUMNS).map(|_| random.accumulator()));
        }
        Inputs { steps, a, b, c }
    }

    fn expected(&self, index: usize) -> f32 {
        let (tile, row, column) = (index / (ROWS * COLUMNS), index % (ROWS * COLUMNS) / COLUMNS, index % COLUMNS);
        let columns = self.steps * STEP;
        let (a, b) = (&self.a[(tile * ROWS + row) * columns..], &self.b[(tile * COLUMNS + column) * columns..]);
        (0..self.steps).fold(self.c[index], |sum, step| {
            let part = |values: &[u16]| std::array::from_fn(|k| values[step * STEP + k]);
            fma16::step(sum, &part(a), &part(b))
        })
    }

    /// The emulator is slow, so the outputs are dealt to all cores.
    fn compare(&self, found: &[f32]) -> Found {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let share = found.len().div_ceil(threads).max(1);
        let mut total = Found::default();
        std::thread::scope(|scope| {
            let parts = found.chunks(share).enumerate();
            let running: Vec<_> =
                parts.map(|(part, found)| scope.spawn(move || self.compare_from(part * share, found))).collect();
            for part in running {
                let part = part.join().expect("a comparison does not panic");
                total.compared += part.compared;
                total.differ += part.differ;
                total.first = total.first.take().or(part.first);
            }
        });
        total
    }

    fn compare_from(&self, first: usize, found: &[f32]) -> Found {
        let mut result = Found { compared: found.len(), ..Found::default() };
        for (index, found) in found.iter().enumerate() {
            let expected = self.expected(first + index);
            if found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan()) {
                result.differ += 1;
                result.first.get_or_insert_with(|| {
                    let (found, expected) = (found.to_bits(), expected.to_bits());
                    format!("output {}: {found:#010x}, expected {expected:#010x}", first + index)
                });
            }
        }
        result
    }
}

/// Numbers from a counter, for probes.
pub(crate) struct Random(pub u64);

impl Random {
    /// 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Appends rows whose exponents lie close together, far apart, at both ends or anywhere, with zeros in between and
    /// now and then a row of NaN or infinities beside ordinary ones.
    fn operand(&mut self, values: &mut Vec<u16>, rows: usize, columns: usize, tile: usize) {
        let ranges = [(120, 134), (87, 167), (0, 3), (1, 254), (126, 127), (200, 254)];
        for row in 0..rows {
            let (low, high) = ranges[(tile + row / 3) % ranges.len()];
            let first = values.len();
            for _ in 0..columns {
                let bits = self.next();
                let exponent = (low + (bits >> 32) % (high - low + 1)) as u16;
                let value = (bits as u16 & 0x807f) | exponent << 7;
                values.push(if (bits >> 20).is_multiple_of(11) { value & 0x8000 } else { value });
            }
            match self.next() % 24 {
                0 => values[first..].fill(0x7fc0),
                1 => values[first..].fill(0x7f80),
                2 => values[first] = 0xff80,
                _ => {}
            }
        }
    }

    fn accumulator(&mut self) -> f32 {
        let bits = self.next();
        match bits >> 60 {
            0..4 => 0.0,
            4 => f32::from_bits(bits as u32),
            _ => f32::from_bits((bits as u32 & 0x807f_ffff) | ((100 + (bits >> 32) % 60) as u32) << 23),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_is_off_by_one_bit_is_found() {
        let inputs = Inputs::new(24, 3, 5);
        let mut outputs: Vec<f32> = (0..inputs.c.len()).map(|index| inputs.expected(index)).collect();
        assert!(outputs.iter().any(|value| value.is_nan()) && outputs.iter().any(|value| value.is_finite()));
        assert_eq!(inputs.compare(&outputs), Found { compared: outputs.len(), ..Found::default() });
        let at = outputs.iter().rposition(|value| value.is_finite()).expect("there is a finite output");
        outputs[at] = f32::from_bits(outputs[at].to_bits() ^ 1);
        let found = inputs.compare(&outputs);
        assert_eq!(found.differ, 1);
        assert!(found.first.is_some_and(|text| text.starts_with(&format!("output {at}: "))));
    }
}
