//! Every operation of every level against the same operation on one lane, on special and random values.

use tf_numerics::lanes::{Float, Int, Kernel, Lanes, Level, Mask, WIDTH, dispatch};
use tf_numerics::{fp8, mxfp4};

/// Floats of all kinds: signed zeros, subnormals, neighbours of powers of two, ties, infinities, NaN, random patterns.
fn floats() -> Vec<f32> {
    let mut values = vec![];
    let specials = [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 0.5, 1.0, 1.5, 2.5, 448.0, 6.0, f32::MAX, f32::INFINITY];
    for special in specials {
        for value in [special, special.next_up(), special.next_down()] {
            values.extend([value, -value]);
        }
    }
    values.push(f32::NAN);
    let mut state = 88172645463325252u64;
    while values.len() < 4096 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bits = (state >> 32) as u32;
        let value = f32::from_bits(bits);
        // Random patterns are quiet NaNs where they are NaN: arithmetic makes no other.
        values.push(if value.is_nan() { f32::from_bits(bits | 0x0040_0000) } else { value });
        // Half of them near one another, so that sums and comparisons are not one-sided.
        values.push(f32::from_bits(bits & 0x807f_ffff | (120 + bits % 12) << 23));
    }
    values.truncate(4096);
    values
}

struct Each<'a> {
    a: &'a [f32; WIDTH],
    b: &'a [f32; WIDTH],
    c: &'a [f32; WIDTH],
}

#[inline(always)]
fn bits_of<L: Lanes>(value: L) -> [u32; WIDTH] {
    L::int_to_array(value.to_bits())
}

#[inline(always)]
fn spread<L: Lanes>(mask: L::Mask) -> [u32; WIDTH] {
    let bits = mask.bits();
    assert!(bits <= 0xffff);
    assert_eq!(mask.any(), bits != 0);
    assert_eq!(mask.all(), bits == 0xffff);
    std::array::from_fn(|l| bits >> l & 1)
}

impl Kernel for Each<'_> {
    type Output = Vec<(&'static str, [u32; WIDTH])>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        let (a, b, c) = (L::load_array(self.a), L::load_array(self.b), L::load_array(self.c));
        let (i, j) = (a.to_bits(), b.to_bits());
        let m = a.lt(b);
        // Conversions to integers are defined below 2^31 only.
        let small = L::select(a.abs().lt(L::splat(2e9)), a, L::splat(1.5));
        vec![
            ("add", bits_of(a + b)),
            ("sub", bits_of(a - b)),
            ("mul", bits_of(a * b)),
            ("div", bits_of(a / b)),
            ("neg", bits_of(-a)),
            ("fma", bits_of(a.fma(b, c))),
            ("sqrt", bits_of(a.sqrt())),
            ("abs", bits_of(a.abs())),
            ("min", bits_of(a.min(b))),
            ("max", bits_of(a.max(b))),
            ("round_even", bits_of(a.round_even())),
            ("bf16_round", bits_of(a.bf16_round())),
            ("select", bits_of(L::select(m, a, c))),
            ("lt", spread::<L>(m)),
            ("le", spread::<L>(a.le(b))),
            ("gt", spread::<L>(a.gt(b))),
            ("ge", spread::<L>(a.ge(b))),
            ("eq", spread::<L>(Float::eq(a, b))),
            ("is_nan", spread::<L>(a.is_nan())),
            ("mask and", spread::<L>(m.and(a.gt(c)))),
            ("mask or", spread::<L>(m.or(a.gt(c)))),
            ("mask not", spread::<L>(m.not())),
            ("to_int", L::int_to_array(small.to_int())),
            ("to_int_trunc", L::int_to_array(small.to_int_trunc())),
            ("from_int", bits_of(L::from_int(i))),
            ("int add", L::int_to_array(i.add(j))),
            ("int sub", L::int_to_array(i.sub(j))),
            ("int mul", L::int_to_array(i.mul(j))),
            ("int and", L::int_to_array(i.and(j))),
            ("int or", L::int_to_array(i.or(j))),
            ("int xor", L::int_to_array(i.xor(j))),
            ("int not", L::int_to_array(i.not())),
            ("shl", L::int_to_array(i.shl(5))),
            ("shr", L::int_to_array(i.shr(5))),
            ("sar", L::int_to_array(i.sar(5))),
            ("rotate", L::int_to_array(i.rotate_left(13))),
            ("int eq", spread::<L>(Int::eq(i.and(L::Int::splat(3)), j.and(L::Int::splat(3))))),
            ("lt signed", spread::<L>(i.lt_signed(j))),
            ("lt unsigned", spread::<L>(i.lt_unsigned(j))),
            ("max unsigned", L::int_to_array(i.max_unsigned(j))),
            ("int select", L::int_to_array(L::Int::select(m, i, j))),
            ("fold", [a.fold().to_bits(); WIDTH]),
            ("fold_max", [a.fold_max().to_bits(); WIDTH]),
            ("fold_max_unsigned", [L::fold_max_unsigned(i); WIDTH]),
            ("iota", L::int_to_array(L::iota())),
            ("splat", bits_of(L::splat(self.a[3]))),
            ("int splat", L::int_to_array(L::Int::splat(self.a[3].to_bits()))),
        ]
    }
}

/// The same list in plain scalar code.
fn wanted(a: &[f32; WIDTH], b: &[f32; WIDTH], c: &[f32; WIDTH]) -> Vec<(&'static str, [u32; WIDTH])> {
    let f = |f: &dyn Fn(f32, f32, f32) -> f32| std::array::from_fn(|l| f(a[l], b[l], c[l]).to_bits());
    let m = |f: &dyn Fn(f32, f32, f32) -> bool| std::array::from_fn(|l| f(a[l], b[l], c[l]) as u32);
    let i = |f: &dyn Fn(u32, u32) -> u32| std::array::from_fn(|l| f(a[l].to_bits(), b[l].to_bits()));
    let small = |x: f32| if x.abs() < 2e9 { x } else { 1.5 };
    let halves = |f: &dyn Fn(f32, f32) -> f32| {
        let mut t = *a;
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                t[l] = f(t[l], t[l + half]);
            }
        }
        [t[0].to_bits(); WIDTH]
    };
    let bf16 = |x: f32| tf_numerics::bf16::round(x);
    vec![
        ("add", f(&|a, b, _| a + b)),
        ("sub", f(&|a, b, _| a - b)),
        ("mul", f(&|a, b, _| a * b)),
        ("div", f(&|a, b, _| a / b)),
        ("neg", f(&|a, _, _| f32::from_bits(a.to_bits() ^ 0x8000_0000))),
        ("fma", f(&|a, b, c| a.mul_add(b, c))),
        ("sqrt", f(&|a, _, _| a.sqrt())),
        ("abs", f(&|a, _, _| f32::from_bits(a.to_bits() & 0x7fff_ffff))),
        ("min", f(&|a, b, _| if a < b { a } else { b })),
        ("max", f(&|a, b, _| if a > b { a } else { b })),
        ("round_even", f(&|a, _, _| a.round_ties_even())),
        ("bf16_round", f(&|a, _, _| bf16(a))),
        ("select", f(&|a, b, c| if a < b { a } else { c })),
        ("lt", m(&|a, b, _| a < b)),
        ("le", m(&|a, b, _| a <= b)),
        ("gt", m(&|a, b, _| a > b)),
        ("ge", m(&|a, b, _| a >= b)),
        ("eq", m(&|a, b, _| a == b)),
        ("is_nan", m(&|a, _, _| a.is_nan())),
        ("mask and", m(&|a, b, c| a < b && a > c)),
        ("mask or", m(&|a, b, c| a < b || a > c)),
        ("mask not", m(&|a, b, _| a < b).map(|v: u32| v ^ 1)),
        ("to_int", i(&|a, _| small(f32::from_bits(a)).round_ties_even() as i32 as u32)),
        ("to_int_trunc", i(&|a, _| small(f32::from_bits(a)) as i32 as u32)),
        ("from_int", i(&|a, _| (a as i32 as f32).to_bits())),
        ("int add", i(&|a, b| a.wrapping_add(b))),
        ("int sub", i(&|a, b| a.wrapping_sub(b))),
        ("int mul", i(&|a, b| a.wrapping_mul(b))),
        ("int and", i(&|a, b| a & b)),
        ("int or", i(&|a, b| a | b)),
        ("int xor", i(&|a, b| a ^ b)),
        ("int not", i(&|a, _| !a)),
        ("shl", i(&|a, _| a << 5)),
        ("shr", i(&|a, _| a >> 5)),
        ("sar", i(&|a, _| (a as i32 >> 5) as u32)),
        ("rotate", i(&|a, _| a.rotate_left(13))),
        ("int eq", i(&|a, b| (a & 3 == b & 3) as u32)),
        ("lt signed", i(&|a, b| ((a as i32) < b as i32) as u32)),
        ("lt unsigned", i(&|a, b| (a < b) as u32)),
        ("max unsigned", i(&|a, b| a.max(b))),
        ("int select", i(&|a, b| if f32::from_bits(a) < f32::from_bits(b) { a } else { b })),
        ("fold", halves(&|a, b| a + b)),
        ("fold_max", halves(&|a, b| if a > b { a } else { b })),
        ("fold_max_unsigned", [a.iter().map(|v| v.to_bits()).max().unwrap(); WIDTH]),
        ("iota", std::array::from_fn(|l| l as u32)),
        ("splat", [a[3].to_bits(); WIDTH]),
        ("int splat", [a[3].to_bits(); WIDTH]),
    ]
}

/// Operations whose result is a float, where any NaN equals any NaN.
fn is_float(name: &str) -> bool {
    !name.contains("int") && !name.contains("unsigned") && !name.contains("mask") && !matches!(name, "iota" | "shl")
}

#[test]
fn every_operation_has_the_bits_of_one_lane() {
    let values = floats();
    let mut cases = 0;
    for (round, a) in values.as_chunks::<WIDTH>().0.iter().enumerate() {
        // Two other places of the list, so that special values meet each other.
        for shift in [0, 1, 37, 1_000, 2_049] {
            let take = |by: usize| std::array::from_fn(|l| values[(WIDTH * round + l + by) % values.len()]);
            let (b, c): ([f32; WIDTH], [f32; WIDTH]) = (take(shift), take(3 * shift + 5));
            let wanted = wanted(a, &b, &c);
            for level in Level::available() {
                let got = dispatch(level, Each { a, b: &b, c: &c });
                assert_eq!(got.len(), wanted.len());
                for ((name, got), (name_wanted, wanted)) in got.into_iter().zip(&wanted) {
                    assert_eq!(name, *name_wanted);
                    for l in 0..WIDTH {
                        let nan = |bits: u32| is_float(name) && f32::from_bits(bits).is_nan();
                        assert!(
                            got[l] == wanted[l] || (nan(got[l]) && nan(wanted[l])),
                            "{level} {name} of {:e} {:e} {:e}: {:#010x}, wanted {:#010x}",
                            a[l],
                            b[l],
                            c[l],
                            got[l],
                            wanted[l]
                        );
                    }
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 50_000);
}

struct Memory<'a> {
    floats: &'a [f32],
    words: &'a [u16],
    bytes: &'a [u8],
}
#[derive(Debug, PartialEq)]
struct Read {
    partial: Vec<Vec<f32>>,
    stored: Vec<f32>,
    bf16: [u32; WIDTH],
    fp8: [u32; WIDTH],
    fp8_finite: [u32; WIDTH],
    bytes: [u32; WIDTH],
    dwords: [u32; WIDTH],
    fp4: Vec<[u32; WIDTH]>,
    low_bytes: Vec<u8>,
}
impl Kernel for Memory<'_> {
    type Output = Read;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Read {
        let mut partial = vec![];
        for count in 0..=WIDTH {
            let lanes = L::load_partial(&self.floats[..count], 9.0);
            let mut out = vec![-1.0; count];
            lanes.store_partial(&mut out);
            out.extend(lanes.to_array());
            partial.push(out);
        }
        let mut stored = vec![-1.0; WIDTH + 1];
        L::load(self.floats).store(&mut stored);
        let packed: &[u8; 64] = self.bytes[..64].try_into().unwrap();
        let dwords = L::load_dwords(packed);
        let mut low_bytes = vec![7; WIDTH + 1];
        L::store_u8(dwords, &mut low_bytes);
        let mut fp4 = vec![];
        for nibble in 0..8 {
            fp4.push(bits_of(L::decode_fp4(dwords, nibble)));
        }
        Read {
            partial,
            stored,
            bf16: bits_of(L::load_bf16(self.words)),
            fp8: bits_of(L::load_fp8(self.bytes)),
            // SAFETY: there are more than 16 bytes.
            fp8_finite: bits_of(unsafe { L::load_fp8_finite_ptr(self.bytes.as_ptr()) }),
            bytes: L::int_to_array(L::load_u8(self.bytes)),
            dwords: L::int_to_array(dwords),
            fp4,
            low_bytes,
        }
    }
}

#[test]
fn memory_is_read_and_written_in_order_at_any_alignment() {
    let floats: Vec<f32> = (0..40).map(|i| i as f32 - 7.5).collect();
    let words: Vec<u16> = (0..40).map(|i| (i * 1_637) as u16).collect();
    let bytes: Vec<u8> = (0..160).map(|i| (i * 59 + 3) as u8).collect();
    for offset in 0..16 {
        let memory = || Memory { floats: &floats[offset..], words: &words[offset..], bytes: &bytes[offset..] };
        let scalar = dispatch(Level::Scalar, memory());
        assert_eq!(scalar.stored[..WIDTH], floats[offset..][..WIDTH]);
        assert_eq!(scalar.stored[WIDTH], -1.0, "nothing is written behind the lanes");
        assert_eq!(scalar.low_bytes[WIDTH], 7, "nothing is written behind the lanes");
        for count in 0..=WIDTH {
            let (out, lanes) = scalar.partial[count].split_at(count);
            assert_eq!(out, &floats[offset..][..count]);
            assert!(lanes[count..].iter().all(|&v| v == 9.0));
        }
        for l in 0..WIDTH {
            let byte = bytes[offset + l];
            assert_eq!(scalar.bf16[l], (words[offset + l] as u32) << 16);
            assert_eq!(scalar.bytes[l], byte as u32);
            let dword = u32::from_le_bytes(bytes[offset + 4 * l..][..4].try_into().unwrap());
            assert_eq!(scalar.dwords[l], dword);
            assert_eq!(scalar.low_bytes[l], dword as u8);
            for n in 0..8 {
                assert_eq!(scalar.fp4[n][l], mxfp4::E2M1[(dword >> (4 * n) & 15) as usize].to_bits());
            }
        }
        for level in Level::available() {
            assert_eq!(dispatch(level, memory()), scalar, "{level} at {offset}");
        }
    }
}

#[test]
fn every_fp8_code_is_decoded_on_every_level() {
    let codes: Vec<u8> = (0..=255).collect();
    for level in Level::available() {
        for chunk in codes.chunks(WIDTH) {
            let mut bytes = chunk.to_vec();
            bytes.resize(64, 0);
            let read = dispatch(level, Memory { floats: &[0.0; WIDTH], words: &[0; WIDTH], bytes: &bytes });
            for (l, &code) in chunk.iter().enumerate() {
                let wanted = fp8::decode_e4m3(code);
                let (got, finite) = (f32::from_bits(read.fp8[l]), f32::from_bits(read.fp8_finite[l]));
                if wanted.is_nan() {
                    assert!(got.is_nan());
                    assert_eq!(finite.abs(), 480.0);
                } else {
                    assert_eq!(got.to_bits(), wanted.to_bits(), "{level} {code:#04x}");
                    assert_eq!(finite.to_bits(), wanted.to_bits(), "{level} {code:#04x}");
                }
            }
        }
    }
}

struct Encode<'a>(&'a [f32]);
impl Kernel for Encode<'_> {
    type Output = Vec<(u32, u32)>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        let mut out = vec![];
        for x in self.0.as_chunks::<WIDTH>().0 {
            let x = L::load_array(x);
            let fp8 = L::int_to_array(fp8::encode_e4m3_lanes(x));
            let fp4 = L::int_to_array(mxfp4::encode_lanes(x));
            out.extend(fp8.into_iter().zip(fp4));
        }
        out
    }
}

#[test]
fn lanes_encode_as_one_value_does() {
    let values = floats();
    for level in Level::available() {
        let got = dispatch(level, Encode(&values));
        for (x, (fp8, fp4)) in values.iter().zip(got) {
            assert_eq!(fp8, fp8::encode_e4m3(*x) as u32, "{level} {x:e}");
            assert_eq!(fp4, mxfp4::encode(*x) as u32, "{level} {x:e}");
        }
    }
}

#[test]
fn levels_have_names_and_an_order() {
    for level in Level::ALL {
        assert_eq!(Level::parse(level.name()), Some(level));
        assert_eq!(level.to_string(), level.name());
    }
    assert_eq!(Level::parse("sse"), None);
    let available = Level::available();
    assert_eq!(available[0], Level::Scalar);
    assert_eq!(*available.last().unwrap(), Level::best());
    println!("levels tested here: {available:?}");
}
