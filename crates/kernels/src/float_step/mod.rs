//! `float_step`: whether this GPU's float32 is the one that the kernels with the CPU's bits were written for: correctly rounded
//! sums, products, quotients and roots, `fma` in one rounding, nothing contracted. Compilers and chips that nobody has tried are
//! asked before a model is trusted to them. A device that takes subnormals for zero has other bits than the CPU where values
//! are that small, and the same bits for the same work: that is counted apart and refuses nothing.

use crate::gpu::{a_thread_each, program};
use crate::tensor_step::Random;
use tf_device::gpu::{Binding, GpuDevice, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, Device, LaunchError};

/// The Metal text, for controls.
pub const SOURCE: &str = include_str!("kernel.metal");
static PROGRAM: Program = program("float_step", Some(SOURCE), false);

/// Outputs of an item, by the operation that makes them.
const OPERATIONS: [&str; 10] = [
    "a + b",
    "a - b",
    "a * b",
    "a / b",
    "sqrt(|a|)",
    "fma(a, b, c)",
    "a * b + c",
    "rint(a)",
    "1 / sqrt(|a| + 1)",
    "a * 2^-70 * 2^-70",
];

/// What a probe has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub compared: usize,
    pub differ: usize,
    /// Outputs that only differ because subnormals were taken for zero; no part of `differ`.
    pub flushed: usize,
    /// The first output that differs.
    pub first: Option<String>,
}

/// Runs the operations on `items` triples of every exponent, zeros, infinities and NaNs, and compares each output with the
/// host's, bit for bit (a NaN is a NaN).
///
/// # Errors
/// [`LaunchError::NoKernel`] on a device that is not Metal; [`LaunchError::Device`].
pub fn probe(queue: &mut GpuQueue, items: usize, seed: u64) -> Result<Found, LaunchError> {
    let device = Device::Gpu(GpuDevice::new(queue.driver().clone()));
    let [a, b, c] = inputs(items, seed);
    let on_device = |values: &[f32]| Buffer::from_slice(&device, values);
    let (a_there, b_there, c_there) = (on_device(&a)?, on_device(&b)?, on_device(&c)?);
    let mut out = on_device(&vec![f32::MAX; items * OPERATIONS.len()])?;
    let (groups, threads) = a_thread_each(items);
    let bindings =
        &mut [Binding::Read(&a_there), Binding::Read(&b_there), Binding::Read(&c_there), Binding::Write(&mut out)];
    let shape = ShapeBytes::new().uint(items);
    let shape = shape.bytes();
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "float_probe",
        bindings,
        shape,
        groups,
        threads,
        shared_bytes: 0,
    })?;
    Ok(compare(&[a, b, c], &out.to_vec()?))
}

/// Operands of an item: two near each other, far apart, near the ends of the range, or special.
fn inputs(items: usize, seed: u64) -> [Vec<f32>; 3] {
    const SPECIAL: [u32; 10] =
        [0, 0x8000_0000, 1, 0x807f_ffff, 0x0080_0000, 0x3f80_0000, 0x7f7f_ffff, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000];
    let mut random = Random(seed);
    let mut values: [Vec<f32>; 3] = Default::default();
    for item in 0..items {
        let exponents = [(120, 8), (1, 254), (0, 3), (60, 20), (190, 64)][item % 5];
        for column in &mut values {
            let bits = random.next();
            let exponent = exponents.0 + (bits >> 32) as u32 % exponents.1;
            let ordinary = (bits as u32 & 0x807f_ffff) | exponent << 23;
            let special = SPECIAL[(bits >> 40) as usize % SPECIAL.len()];
            column.push(f32::from_bits(if (bits >> 50).is_multiple_of(16) { special } else { ordinary }));
        }
    }
    values
}

/// The outputs of an item where every operand and result goes through `keep`.
fn expected([a, b, c]: [f32; 3], keep: fn(f32) -> f32) -> [f32; 10] {
    let small = f32::from_bits(0x1c80_0000);
    let [a, b, c] = [a, b, c].map(keep);
    [
        a + b,
        a - b,
        a * b,
        a / b,
        a.abs().sqrt(),
        a.mul_add(b, c),
        keep(a * b) + c,
        a.round_ties_even(),
        1.0 / keep((a.abs() + 1.0).sqrt()),
        keep(a * small) * small,
    ]
    .map(keep)
}

fn unchanged(value: f32) -> f32 {
    value
}

fn without_subnormals(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

fn compare([a, b, c]: &[Vec<f32>; 3], found: &[f32]) -> Found {
    let mut result = Found { compared: found.len(), ..Found::default() };
    let rows = found.chunks_exact(OPERATIONS.len()).zip(a.iter().zip(b).zip(c));
    for (found, ((a, b), c)) in rows {
        let operands = [*a, *b, *c];
        let outputs = expected(operands, unchanged).into_iter().zip(expected(operands, without_subnormals));
        for ((found, (expected, flushed)), operation) in found.iter().zip(outputs).zip(OPERATIONS) {
            if found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()) {
                continue;
            }
            // Zeros of either sign are alike here.
            if *found == flushed || (found.is_nan() && flushed.is_nan()) {
                result.flushed += 1;
                continue;
            }
            result.differ += 1;
            result.first.get_or_insert_with(|| {
                let [a, b, c, found, expected] = [*a, *b, *c, *found, expected].map(f32::to_bits);
                format!("{operation} of {a:#010x} {b:#010x} {c:#010x}: {found:#010x}, expected {expected:#010x}")
            });
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    type Differs = fn([f32; 3], [f32; 10]) -> [f32; 10];

    /// Outputs of a device that differs from the host in one way.
    fn outputs(inputs: &[Vec<f32>; 3], differs: Differs) -> Vec<f32> {
        let [a, b, c] = inputs;
        let items = a.iter().zip(b).zip(c).map(|((a, b), c)| [*a, *b, *c]);
        items.flat_map(|operands| differs(operands, expected(operands, unchanged))).collect()
    }

    #[test]
    fn a_device_that_contracts_or_divides_roughly_is_found_by_the_operation() {
        let inputs = inputs(2000, 3);
        let same = compare(&inputs, &outputs(&inputs, |_, out| out));
        assert_eq!(same, Found { compared: 20_000, ..Found::default() });
        let cases: [(&str, Differs); 4] = [
            ("a * b + c of", |[a, b, c], mut out| {
                out[6] = a.mul_add(b, c);
                out
            }),
            ("fma(a, b, c) of", |[a, b, c], mut out| {
                out[5] = a * b + c;
                out
            }),
            ("a / b of", |[a, b, _], mut out| {
                out[3] = a * (1.0 / b);
                out
            }),
            ("rint(a) of", |[a, ..], mut out| {
                out[7] = a.trunc();
                out
            }),
        ];
        for (operation, differs) in cases {
            let found = compare(&inputs, &outputs(&inputs, differs));
            let is_named = found.first.as_ref().is_some_and(|text| text.starts_with(operation));
            assert!(found.differ > 3 && is_named, "{operation}: {found:?}");
        }
    }

    #[test]
    fn a_device_without_subnormals_is_told_apart_from_one_that_is_wrong() {
        let inputs = inputs(2000, 4);
        let found = compare(&inputs, &outputs(&inputs, |operands, _| expected(operands, without_subnormals)));
        assert!(found.flushed > 100, "{found:?}");
        assert_eq!((found.differ, found.first), (0, None));
        let found = compare(
            &inputs,
            &outputs(&inputs, |_, out| out.map(|value| if value.is_subnormal() { 1.0 } else { value })),
        );
        assert!(found.differ > 100 && found.flushed == 0, "{found:?}");
    }
}
