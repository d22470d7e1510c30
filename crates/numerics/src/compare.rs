//! Comparing results: bit for bit, or within a bound for each element. Never by one average over everything.

use std::fmt;

/// Two values that should be the same.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    pub index: usize,
    pub got: f32,
    pub wanted: f32,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { index, got, wanted } = self;
        let (got_bits, wanted_bits) = (got.to_bits(), wanted.to_bits());
        write!(f, "element {index} is {got:e} ({got_bits:#010x}), expected {wanted:e} ({wanted_bits:#010x})")?;
        match ulps(*got, *wanted) {
            Some(distance) => write!(f, ", {distance} ulp apart"),
            None => Ok(()),
        }
    }
}

/// The first element whose bits differ; any NaN equals any NaN, +0 and -0 differ. Both slices have the same length.
pub fn first_difference(got: &[f32], wanted: &[f32]) -> Option<Difference> {
    assert_eq!(got.len(), wanted.len(), "results of different lengths");
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let index = got.iter().zip(wanted).position(|(&a, &b)| !same(a, b))?;
    Some(Difference { index, got: got[index], wanted: wanted[index] })
}

/// How many float32 values lie between two values, counting one of them; zeros are the same. `None` for NaN.
pub fn ulps(a: f32, b: f32) -> Option<u32> {
    if a.is_nan() || b.is_nan() {
        return None;
    }
    let ordered = |x: f32| {
        let magnitude = (x.to_bits() & 0x7fff_ffff) as i64;
        if x.is_sign_negative() { -magnitude } else { magnitude }
    };
    Some(ordered(a).abs_diff(ordered(b)) as u32)
}

/// A value that is further from the exact one than its bound allows.
#[derive(Clone, Copy, Debug)]
pub struct Excess {
    pub index: usize,
    pub got: f32,
    pub exact: f64,
    pub bound: f64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Excess { index, got, exact, bound } = self;
        let error = (*got as f64 - exact).abs();
        write!(f, "element {index} is {got:e}, exact is {exact:e}: off by {error:e}, allowed are {bound:e}")
    }
}

/// The element that exceeds its bound by the largest factor. `bounds` are absolute errors; a NaN or infinity is within bounds
/// only where the exact value is the same. All slices have the same length.
pub fn worst_excess(got: &[f32], exact: &[f64], bounds: &[f64]) -> Option<Excess> {
    assert_eq!(got.len(), exact.len(), "results of different lengths");
    assert_eq!(got.len(), bounds.len(), "one bound an element");
    let mut worst: Option<(f64, Excess)> = None;
    for (index, ((&got, &exact), &bound)) in got.iter().zip(exact).zip(bounds).enumerate() {
        if got as f64 == exact || (got.is_nan() && exact.is_nan()) {
            continue;
        }
        let error = (got as f64 - exact).abs();
        // A NaN error or bound must count as an excess, hence the form of the test.
        if error <= bound && error.is_finite() {
            continue;
        }
        let factor = if bound > 0.0 && error.is_finite() { error / bound } else { f64::INFINITY };
        if worst.as_ref().is_none_or(|(largest, _)| factor > *largest) {
            worst = Some((factor, Excess { index, got, exact, bound }));
        }
    }
    worst.map(|(_, excess)| excess)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_difference_in_bits() {
        assert!(first_difference(&[1.0, f32::NAN, -0.0], &[1.0, -f32::NAN, -0.0]).is_none());
        let found = first_difference(&[1.0, 0.0, 2.0], &[1.0, -0.0, 3.0]).unwrap();
        assert_eq!(found.index, 1);
        let text = first_difference(&[1.0f32.next_up()], &[1.0]).unwrap().to_string();
        assert_eq!(text, "element 0 is 1.0000001e0 (0x3f800001), expected 1e0 (0x3f800000), 1 ulp apart");
    }

    #[test]
    fn counts_values_between_across_zero() {
        let smallest = f32::from_bits(1);
        let cases = [
            (1.0, 1.0, Some(0)),
            (0.0, -0.0, Some(0)),
            (1.0, 2.0, Some(1 << 23)),
            (smallest, -smallest, Some(2)),
            (f32::MAX, f32::INFINITY, Some(1)),
            (f32::NAN, 1.0, None),
        ];
        for (a, b, distance) in cases {
            assert_eq!(ulps(a, b), distance, "{a} {b}");
            assert_eq!(ulps(b, a), distance, "{b} {a}");
        }
    }

    #[test]
    fn reports_the_worst_element_and_every_bad_number() {
        assert!(worst_excess(&[1.0, 2.5], &[1.0, 2.0], &[0.0, 0.5]).is_none());
        assert_eq!(worst_excess(&[1.2, 2.5], &[1.0, 2.0], &[0.1, 0.1]).unwrap().index, 1);
        assert!(worst_excess(&[f32::NAN], &[f64::NAN], &[0.0]).is_none());
        for (got, exact, bound) in
            [(f32::NAN, 1.0, 1.0), (1.0, f64::NAN, 1.0), (f32::INFINITY, 1.0, f64::INFINITY), (1.0, 1.5, f64::NAN)]
        {
            assert!(worst_excess(&[got], &[exact], &[bound]).is_some(), "{got} {exact} {bound}");
        }
    }
}
