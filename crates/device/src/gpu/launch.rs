//! A launch as a kernel family writes it.

use crate::{Buffer, Element};

/// A family's GPU code: one source a backend, the same entries in each.
#[derive(Debug)]
pub struct Program {
    /// The family's folder: the name of its set of cubins.
    pub name: &'static str,
    /// The text of `kernel.metal`, where there is one.
    pub metal: Option<&'static str>,
    /// Texts that the Metal source includes, by name.
    pub metal_includes: &'static [(&'static str, &'static str)],
    /// Whether there is a `kernel.cu`.
    pub cuda: bool,
}

impl Program {
    /// The Metal source as a compiler takes it: each quoted include in its place, once.
    pub fn metal_text(&self) -> Option<String> {
        Some(Program::expanded(self.metal?, self.metal_includes))
    }

    /// As [`Program::metal_text`], for texts of which one may be another than the program's own.
    pub fn expanded(text: &str, includes: &[(&str, &str)]) -> String {
        fn expand(text: &str, includes: &[(&str, &str)], seen: &mut Vec<String>, out: &mut String) {
            for line in text.lines() {
                let wanted = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
                let Some(wanted) = wanted else {
                    out.push_str(line);
                    out.push('\n');
                    continue;
                };
                let included = includes.iter().find(|(name, _)| *name == wanted);
                if let (Some((_, included)), false) = (included, seen.iter().any(|name| name == wanted)) {
                    seen.push(wanted.to_owned());
                    expand(included, includes, seen, out);
                }
            }
        }
        let mut out = String::new();
        expand(text, includes, &mut Vec::new(), &mut out);
        out
    }
}

/// What a parameter of an entry is bound to.
pub enum Binding<'a> {
    Read(&'a Buffer),
    /// From this byte on.
    ReadAt(&'a Buffer, usize),
    /// Read and written in place.
    Write(&'a mut Buffer),
    /// From this byte on.
    WriteAt(&'a mut Buffer, usize),
    /// Host metadata, copied when the launch is encoded; see [`bytes_of`].
    Bytes(&'a [u8]),
    /// Neither read nor written by this launch.
    Missing,
}

/// One launch. Parameters of the entry: the bindings in order, then `shape` by value.
pub struct Launch<'a, 'b> {
    pub program: &'static Program,
    pub entry: &'static str,
    pub bindings: &'b mut [Binding<'a>],
    /// See [`ShapeBytes`].
    pub shape: &'b [u8],
    /// Threadgroups (blocks). None: nothing is launched.
    pub groups: u32,
    /// Threads of a group, a multiple of 32.
    pub threads: u32,
    /// Dynamic threadgroup (shared) memory.
    pub shared_bytes: u32,
}

/// What only changes speed, and only on devices that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Groups of a cluster, 1 for none; divides the group count. [`Tuning::WHOLE_GRID`]: all groups are on the device at once
    /// and may wait for each other, or the launch is refused.
    pub cluster: u32,
    /// Starts while the launch before it still runs; the kernel itself waits before it reads what that one writes.
    pub overlap: bool,
}

impl Tuning {
    /// See [`Tuning::cluster`].
    pub const WHOLE_GRID: u32 = 0;
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { cluster: 1, overlap: false }
    }
}

/// Values that are their bytes.
///
/// # Safety
/// The type has no padding, and every byte of it may be read.
pub unsafe trait Plain: Copy + 'static {}

// SAFETY: elements are numbers.
unsafe impl<T: Element> Plain for T {}

/// The bytes of host metadata, for [`Binding::Bytes`].
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` has no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// A kernel's `Shape`, laid out as C++ does in both languages.
#[derive(Clone, Copy, Debug)]
pub struct ShapeBytes {
    bytes: [u8; ShapeBytes::MAX],
    length: usize,
    alignment: usize,
}

impl Default for ShapeBytes {
    fn default() -> ShapeBytes {
        ShapeBytes::new()
    }
}

impl ShapeBytes {
    /// Room of all fields together.
    pub const MAX: usize = 512;

    pub const fn new() -> ShapeBytes {
        ShapeBytes { bytes: [0; ShapeBytes::MAX], length: 0, alignment: 4 }
    }

    /// A `uint`. Kernels count in 32 bits; launchers check limits far below.
    pub fn uint(self, value: usize) -> ShapeBytes {
        self.push(&u32::try_from(value).unwrap_or(u32::MAX).to_ne_bytes())
    }

    /// A `float`.
    pub fn float(self, value: f32) -> ShapeBytes {
        self.push(&value.to_ne_bytes())
    }

    /// A `ulong` (CUDA: `unsigned long long`).
    pub fn ulong(self, value: u64) -> ShapeBytes {
        self.push(&value.to_ne_bytes())
    }

    /// The struct, padded to its alignment.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length.next_multiple_of(self.alignment)]
    }

    fn push(mut self, value: &[u8]) -> ShapeBytes {
        self.alignment = self.alignment.max(value.len());
        let first = self.length.next_multiple_of(value.len());
        self.bytes[first..first + value.len()].copy_from_slice(value);
        self.length = first + value.len();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::{ShapeBytes, bytes_of};

    #[test]
    fn a_metal_source_has_its_includes_in_place_once() {
        let includes: &[(&str, &str)] = &[("a.metal", "first\n"), ("b.metal", "#include \"a.metal\"\nsecond\n")];
        let text = "#include <metal_stdlib>\n#include \"a.metal\"\n#include \"b.metal\"\nthird\n";
        let program = super::Program { name: "p", metal: Some(text), metal_includes: includes, cuda: false };
        assert_eq!(program.metal_text().unwrap(), "#include <metal_stdlib>\nfirst\nsecond\nthird\n");
        assert_eq!(super::Program { metal: None, ..program }.metal_text(), None);
    }

    #[test]
    fn a_shape_is_laid_out_as_c_does() {
        let shape = ShapeBytes::new().uint(7).ulong(0x0102_0304_0506_0708).float(1.0);
        let mut expected = vec![7, 0, 0, 0, 0, 0, 0, 0];
        expected.extend(0x0102_0304_0506_0708_u64.to_ne_bytes());
        expected.extend(1.0_f32.to_ne_bytes());
        expected.extend([0; 4]);
        assert_eq!(shape.bytes(), expected);
        assert_eq!(ShapeBytes::new().uint(3).bytes(), [3, 0, 0, 0]);
        assert_eq!(bytes_of(&[0x0102_u16, 3]), [2, 1, 3, 0]);
    }
}
