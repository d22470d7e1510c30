//! Building and launching for the tests of this crate.
#![allow(dead_code)]

use std::path::Path;
use tf_device::{Buffer, Device, Element, Queue};
use tf_kernels::rows::{EntryInfo, RowInfo, WindowInfo};
use tf_metal_emulator::{Argument, BuildError, COMPILER, INSTALL, Launch, Program, RunError, compiler_found};
use tf_numerics::lanes::Level;

/// Whether kernels can be built. Without the compiler a test skips, with its reason; in CI it fails.
pub fn ready(test: &str) -> bool {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        eprintln!("SKIPPED 1 test: {test}: the emulator runs on x86-64 Linux only");
        return false;
    }
    if compiler_found() {
        return true;
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{COMPILER} is missing; {INSTALL}");
    eprintln!("SKIPPED 1 test: {test}: {COMPILER} is missing; {INSTALL}");
    false
}

/// Builds a source with the shared texts that kernels include.
pub fn try_build(name: &str, source: &str) -> Result<Program, BuildError> {
    let prelude = include_str!("../../../kernels/src/shared/prelude.metal");
    let linear = include_str!("../../../kernels/src/shared/linear.metal");
    Program::build(
        name,
        source,
        &[("prelude.metal", prelude), ("linear.metal", linear)],
        Path::new(env!("CARGO_TARGET_TMPDIR")),
    )
}

/// As [`try_build`], for a source that must build.
pub fn build(name: &str, source: &str) -> Program {
    try_build(name, source).unwrap_or_else(|error| panic!("{error}"))
}

/// A launch of `grid` threadgroups of `threads` threads.
pub fn launch<'a>(kernel: &'a str, arguments: Vec<Argument<'a>>, grid: u32, threads: u32) -> Launch<'a> {
    Launch { kernel, arguments, grid: [grid, 1, 1], threads: [threads, 1, 1], threadgroup: Vec::new() }
}

/// `source` with `from` replaced; it must occur exactly once, so that an edit can't miss.
pub fn edited(source: &str, from: &str, to: &str) -> String {
    assert_eq!(source.matches(from).count(), 1, "{from:?} must occur exactly once");
    source.replace(from, to)
}

/// The bytes of numbers, and numbers of bytes.
pub fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    T::bytes(values)
}

/// Numbers that may be seen as bytes.
pub trait Plain: Copy {
    fn bytes(values: &[Self]) -> &[u8];
}

macro_rules! plain {
    ($($kind:ty),*) => { $(
        impl Plain for $kind {
            fn bytes(values: &[Self]) -> &[u8] {
                // SAFETY: a number has no padding, every byte of it may be read, and bytes need no alignment.
                unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
            }
        }
    )* };
}
plain!(u8, u16, u32, f32);

/// A read-only buffer of numbers.
pub fn read<T: Plain>(values: &[T]) -> Argument<'_> {
    Argument::Read(T::bytes(values))
}

/// The float32 values of bytes.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_ne_bytes(word)).collect()
}

/// The words of bytes.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_ne_bytes(word)).collect()
}

/// The text of a launch's error.
pub fn defect(result: Result<tf_metal_emulator::Report, RunError>) -> String {
    match result {
        Ok(_) => "no error".into(),
        Err(error) => error.to_string(),
    }
}

/// One bound buffer: what goes in, or what is written (and may be read before).
#[derive(Clone)]
pub enum Arg {
    In(Vec<u8>),
    Out(Vec<u8>),
}

/// A buffer that is only read.
pub fn input<T: Plain>(values: &[T]) -> Arg {
    Arg::In(T::bytes(values).to_vec())
}

/// A buffer that is read and written.
pub fn in_place<T: Plain>(values: &[T]) -> Arg {
    Arg::Out(T::bytes(values).to_vec())
}

/// An output of `count` words, which hold a NaN until they are written.
pub fn output(count: usize) -> Arg {
    Arg::Out(bytes(&vec![0x7fc0_dead_u32; count]).to_vec())
}

/// A shape: words, floats given as their bits.
pub fn shape(words: &[u32]) -> Arg {
    input(words)
}

/// Runs `kernel` with `simdgroups` SIMD groups a threadgroup and as many threadgroups as `items` SIMD groups need.
pub fn run(program: &Program, kernel: &str, items: usize, simdgroups: u32, args: &mut [Arg]) -> Result<(), String> {
    let arguments = args
        .iter_mut()
        .map(|arg| match arg {
            Arg::In(bytes) => Argument::Read(bytes),
            Arg::Out(bytes) => Argument::Write(bytes),
        })
        .collect();
    let mut launch = launch(kernel, arguments, (items as u32).div_ceil(simdgroups), 32 * simdgroups);
    program.run(&mut launch).map(|_| ()).map_err(|error| error.to_string())
}

/// What a buffer holds.
pub fn bytes_of(arg: &Arg) -> &[u8] {
    match arg {
        Arg::In(bytes) | Arg::Out(bytes) => bytes,
    }
}

/// Threadgroups of 1, 2, 3 and 8 SIMD groups: one item a group, and groups that the items don't fill.
pub const GEOMETRIES: [u32; 4] = [1, 2, 3, 8];

/// Holds the source to `wanted`, one entry an output, over all geometries; then each planted edit must be caught: refused by
/// the compiler, found by the emulator, or different from `wanted` in a bit.
pub fn prove(
    name: &str,
    source: &str,
    wanted: &[Vec<u8>],
    edits: &[(&str, &str, &str)],
    run: impl Fn(&Program, u32) -> Result<Vec<Vec<u8>>, String>,
) {
    let program = build(name, source);
    for simdgroups in GEOMETRIES {
        let got = run(&program, simdgroups).unwrap_or_else(|error| panic!("{name}, {simdgroups} SIMD groups: {error}"));
        assert_eq!(got.len(), wanted.len(), "{name}");
        for (output, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            assert_eq!(got.len(), wanted.len(), "{name}: output {output}");
            if let Some(at) = (0..got.len()).find(|&i| got[i] != wanted[i]) {
                let word = |bytes: &[u8]| bytes.as_chunks::<4>().0.get(at / 4).map(|&w| f32::from_ne_bytes(w));
                panic!(
                    "{name}, {simdgroups} SIMD groups: output {output}, byte {at}: {:?}, wanted {:?}",
                    word(got),
                    word(wanted)
                );
            }
        }
    }
    for (what, from, to) in edits {
        match try_build(name, &edited(source, from, to)).map_err(|error| error.to_string()).and_then(|program| {
            GEOMETRIES[1..3].iter().map(|&simdgroups| run(&program, simdgroups)).collect::<Result<Vec<_>, _>>()
        }) {
            Err(error) => println!("{name}, {what}: {}", error.lines().next().unwrap_or_default()),
            Ok(results) => {
                assert!(results.iter().any(|got| got != wanted), "{name}: the planted {what} was missed");
                println!("{name}, {what}: other bits");
            }
        }
    }
}

/// Every value within its bound of the definition.
pub fn assert_close(what: &str, got: &[f32], wanted: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let (error, bound) = ((f64::from(got) - wanted).abs(), bound(i));
        assert!(error <= bound, "{what}: element {i} is {got}, wanted {wanted}: off by {error:e}, bound {bound:e}");
    }
}

/// The values in float64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Numbers that a wrong kernel can't hide behind: no zeros, no symmetry, magnitudes spread.
pub struct Values(u64);

impl Values {
    /// A generator of the numbers that `seed` names.
    pub fn new(seed: u64) -> Values {
        Values(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    /// 31 bits.
    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    /// In `0..bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        self.word() % bound
    }
    /// In `-scale..scale`.
    pub fn f32(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| ((self.word() >> 7) as f32 / 8_388_608.0 - 1.0 + 1e-4) * scale).collect()
    }
    /// As `f32`, rounded to bf16.
    pub fn bf16(&mut self, count: usize, scale: f32) -> Vec<f32> {
        self.f32(count, scale).into_iter().map(tf_numerics::bf16::round).collect()
    }
}

/// A buffer of the CPU.
pub fn device<T: Element>(values: &[T]) -> Buffer {
    Buffer::from_slice(&Device::cpu(), values).unwrap()
}

/// A queue of the CPU with one thread.
pub fn queue() -> Queue {
    Queue::cpu(1, Level::best())
}

/// What the named buffers hold.
pub fn outputs(args: &[Arg], which: &[usize]) -> Vec<Vec<u8>> {
    which.iter().map(|&i| bytes_of(&args[i]).to_vec()).collect()
}

/// Half the distance of neighbouring bf16 values, relative.
pub const BF16: f64 = 1.0 / 256.0;
/// The same of float32.
pub const F32: f64 = 1.0 / (1u32 << 24) as f64;

/// The words of row records, in the order of their fields.
pub fn row_words(rows: &[RowInfo]) -> Vec<u32> {
    rows.iter().flat_map(|row| [row.slot, row.position, row.window]).collect()
}

/// The words of window records.
pub fn window_words(windows: &[WindowInfo]) -> Vec<u32> {
    windows.iter().flat_map(|window| [window.slot, window.start, window.first_row, window.row_count]).collect()
}

/// The words of entry records.
pub fn entry_words(entries: &[EntryInfo]) -> Vec<u32> {
    entries.iter().flat_map(|entry| [entry.slot, entry.entry, entry.row]).collect()
}

/// Rows of `(slot, start, count)` windows.
pub fn windows(list: &[(u32, u32, u32)]) -> (Vec<RowInfo>, Vec<WindowInfo>) {
    let (mut rows, mut windows) = (Vec::new(), Vec::new());
    for (w, &(slot, start, row_count)) in list.iter().enumerate() {
        windows.push(WindowInfo { slot, start, first_row: rows.len() as u32, row_count });
        rows.extend((start..start + row_count).map(|position| RowInfo { slot, position, window: w as u32 }));
    }
    (rows, windows)
}

/// What one buffer holds.
pub fn outputs_of(args: &[Arg], which: usize) -> Vec<u8> {
    bytes_of(&args[which]).to_vec()
}
