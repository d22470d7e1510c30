//! Every function on samples of all float32 values: the documented bound against float64, equal bits on all levels.

use tf_numerics::lanes::{Float, Kernel, Lanes, Level, dispatch};
use tf_numerics::math;

/// A function of one argument, written once for all lanes.
trait Function: Copy {
    fn at<F: Float>(x: F) -> F;
}

macro_rules! functions {
    ($($name:ident: $body:expr;)*) => {
        $(
            #[allow(non_camel_case_types)]
            #[derive(Clone, Copy)]
            struct $name;
            impl Function for $name {
                #[inline(always)]
                fn at<F: Float>(x: F) -> F {
                    ($body)(x)
                }
            }
        )*
    };
}
functions! {
    exp: math::exp;
    exp2: math::exp2;
    ln: math::ln;
    log1p: math::log1p;
    sigmoid: math::sigmoid;
    silu: math::silu;
    softplus: math::softplus;
    tanh: math::tanh;
    erf: math::erf;
    sin: |x| math::sin_cos(x).0;
    cos: |x| math::sin_cos(x).1;
}

struct Run<'a, T>(T, &'a [f32], &'a mut [f32]);
impl<T: Function> Kernel for Run<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (x, y) in self.1.as_chunks::<16>().0.iter().zip(self.2.as_chunks_mut::<16>().0) {
            T::at(L::load_array(x)).store_array(y);
        }
    }
}

/// All float32 values in steps that visit every exponent many times, and the special ones.
fn samples() -> Vec<f32> {
    let mut samples: Vec<f32> = (0..=u32::MAX).step_by(2039).map(f32::from_bits).collect();
    for special in [
        0.0,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::MAX,
        f32::INFINITY,
        1.0,
        0.5,
        0.625,
        88.72284,
        87.33655,
        103.97208,
    ] {
        for value in [special, special.next_up(), special.next_down()] {
            samples.extend([value, -value]);
        }
    }
    samples.extend([f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)]);
    // Densely where the functions bend.
    samples.extend((-400_000..400_000).map(|i| i as f32 * 2.7e-4));
    samples.extend((-200_000..200_000).map(|i| i as f32 * 1.3e-5));
    samples.extend((0..200_000).map(|i| 1.0 + i as f32 * 1.3e-6 - 0.13));
    samples.resize(samples.len().next_multiple_of(16), 0.25);
    samples
}

/// Distance in ulps of the exact result.
fn ulps(got: f32, exact: f64) -> f64 {
    if got as f64 == exact {
        return 0.0;
    }
    // What float64 holds beyond the largest float32 counts as infinity.
    if exact.abs() >= f32::MAX as f64 * (1.0 + 2f64.powi(-25)) {
        return if got as f64 == exact.signum() * f64::INFINITY { 0.0 } else { f64::INFINITY };
    }
    let exponent = if exact == 0.0 { -126 } else { ((exact.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(-126) };
    (got as f64 - exact).abs() / 2f64.powi(exponent - 23)
}

fn check<T: Function>(function: T, name: &str, bound: f64, exact: impl Fn(f64) -> f64, within: impl Fn(f32) -> bool) {
    let samples: Vec<f32> = samples();
    let one_lane: Vec<f32> = samples.iter().map(|&x| T::at(x)).collect();
    let mut worst = (0.0, 0.0);
    for (&x, &y) in samples.iter().zip(&one_lane) {
        let wanted = exact(x as f64);
        if wanted.is_nan() {
            assert!(y.is_nan(), "{name}({x:e}) = {y:e}");
            continue;
        }
        if within(x) {
            let error = ulps(y, wanted);
            if error > worst.0 || error.is_nan() {
                worst = (error, x);
            }
        }
    }
    println!("{name}: {:.3} ulp at {:e}", worst.0, worst.1);
    assert!(worst.0 <= bound, "{name}({:e}) is {} ulp off, documented are {bound}", worst.1, worst.0);
    let mut levels = 0;
    for level in Level::available() {
        let mut lanes = vec![0.0; samples.len()];
        dispatch(level, Run(function, &samples, &mut lanes));
        for ((x, a), b) in samples.iter().zip(&one_lane).zip(&lanes) {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "{name}({x:e}) is {a:e} in one lane and {b:e} on {level}");
        }
        levels += 1;
    }
    assert!(levels >= 1);
}

fn all(_: f32) -> bool {
    true
}

#[test]
fn exponentials() {
    check(exp, "exp", 1.1, f64::exp, all);
    check(exp2, "exp2", 1.1, f64::exp2, all);
}

#[test]
fn logarithms() {
    check(ln, "ln", 1.0, f64::ln, all);
    check(log1p, "log1p", 2.0, f64::ln_1p, all);
}

#[test]
fn activations() {
    let sigmoid_exact = |x: f64| if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) };
    check(sigmoid, "sigmoid", 2.5, sigmoid_exact, all);
    // A product with a subnormal sigmoid has lost bits before it is scaled up, so the tail is left out here.
    check(silu, "silu", 3.0, |x| x * sigmoid_exact(x), |x| x > -87.0 && x.is_finite());
    check(softplus, "softplus", 2.0, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), all);
    check(tanh, "tanh", 2.0, f64::tanh, all);
}

/// The error function in float64 by its series and, far out, by the continued fraction of the complement.
fn erf_f64(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() || a == 0.0 {
        return x;
    }
    let value = if a < 3.0 {
        let mut term = a;
        let mut sum = a;
        for n in 1..200 {
            term *= -a * a / n as f64;
            sum += term / (2 * n + 1) as f64;
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else if a > 10.0 {
        1.0
    } else {
        let fraction = (1..200).rev().fold(a, |tail, n| a + n as f64 / 2.0 / tail);
        1.0 - (-a * a).exp() / (fraction * std::f64::consts::PI.sqrt())
    };
    value.copysign(x)
}

#[test]
fn error_function() {
    assert!((erf_f64(1.0) - 0.842_700_792_949_714_9).abs() < 1e-15);
    assert!((erf_f64(3.0) - 0.999_977_909_503_001_4).abs() < 1e-14);
    check(erf, "erf", 1.5, erf_f64, all);
}

#[test]
fn sine_and_cosine_up_to_a_million_radians() {
    let samples = samples();
    let in_range = (0..3_000_000).map(|i| i as f32 * 0.366_21).chain(samples).filter(|x| x.abs() <= 1.1e6);
    let mut worst: [(f64, f32); 2] = [(0.0, 0.0); 2];
    for x in in_range {
        let (s, c) = math::sin_cos(x);
        for (i, (got, exact)) in [(s, (x as f64).sin()), (c, (x as f64).cos())].into_iter().enumerate() {
            let error = (got as f64 - exact).abs();
            let bound = (2f64.powi(-25)).max(1.6 * ulp_of(exact));
            if error / bound > worst[i].0 {
                worst[i] = (error / bound, x);
            }
        }
    }
    println!("sin, cos: share of the bound and where {worst:?}");
    assert!(worst.iter().all(|w| w.0 <= 1.0), "{worst:?}");
    for bad in [f32::NAN, f32::INFINITY, 2_097_153.0, -1e30] {
        assert!(math::sin_cos(bad).0.is_nan());
        assert!(math::sin_cos(bad).1.is_nan());
    }
    let exact = |f: fn(f64) -> f64| move |x: f64| if x.abs() <= 2_097_152.0 { f(x) } else { f64::NAN };
    check(sin, "sin", f64::INFINITY, exact(f64::sin), |_| false);
    check(cos, "cos", f64::INFINITY, exact(f64::cos), |_| false);
}

fn ulp_of(exact: f64) -> f64 {
    let exponent = ((exact.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(-126);
    2f64.powi(exponent - 23)
}

#[test]
fn float64_helpers_are_good_to_1e_15() {
    for i in 1..20_000 {
        let x = i as f64 * 37.7 / 3.0;
        let (got, wanted) = (math::ln_f64(x), x.ln());
        assert!((got - wanted).abs() <= 1e-15 * wanted.abs(), "ln {x}: {got:e}, {wanted:e}");
        let y = (i as f64 - 10_000.0) * 0.0123;
        let (got, wanted) = (math::exp_f64(y), y.exp());
        assert!((got - wanted).abs() <= 1e-15 * wanted, "exp {y}: {got:e}, {wanted:e}");
    }
}

#[test]
fn powers_of_the_released_bases_are_far_from_a_tie() {
    // So the float64 value, good to 1e-14, rounds as the exact one does.
    for base in [10_000.0, 160_000.0] {
        for dim in [4u32, 8, 16, 32, 64, 128] {
            for i in 0..dim / 2 {
                let exact = math::pow_f64(base, 2 * i, dim);
                let rounded = math::pow(base, 2 * i, dim);
                let half_ulp = ulp_of(exact) / 2.0;
                let from_tie = (half_ulp - (exact - rounded as f64).abs()) / exact;
                assert!(from_tie > 1e-13, "{base}^({}/{dim}): {from_tie:e}", 2 * i);
            }
        }
    }
    assert_eq!(math::pow(10_000.0, 32, 64), 100.0);
    assert_eq!(math::pow(160_000.0, 16, 64), 20.0);
}
