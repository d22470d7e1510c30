//! One tensor of a checkpoint as it lies in its file.

use std::fmt;

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// Finite variant, one byte.
    F8E4M3,
    /// A power of two, one byte.
    F8E8M0,
    /// In this family: two FP4 values a byte.
    I8,
    Bf16,
    F32,
}

impl Dtype {
    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F8E4M3 => "F8_E4M3",
            Dtype::F8E8M0 => "F8_E8M0",
            Dtype::I8 => "I8",
            Dtype::Bf16 => "BF16",
            Dtype::F32 => "F32",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Dtype> {
        [Dtype::F8E4M3, Dtype::F8E8M0, Dtype::I8, Dtype::Bf16, Dtype::F32]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }

    pub fn bytes(self) -> usize {
        match self {
            Dtype::F8E4M3 | Dtype::F8E8M0 | Dtype::I8 => 1,
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A tensor, borrowed from its mapped file. `bytes` is row-major and little-endian, `shape`'s product times the dtype's
/// size long, and has no particular alignment.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The release's name, whatever alias the file uses.
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
    /// The file that holds it.
    pub file: &'a str,
}

impl View<'_> {
    /// Number of stored elements.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// The bits of a BF16 tensor; `None` for another dtype.
    pub fn bf16_bits(&self) -> Option<Vec<u16>> {
        let bits = |pair: &[u8; 2]| u16::from_le_bytes(*pair);
        (self.dtype == Dtype::Bf16).then(|| self.bytes.as_chunks().0.iter().map(bits).collect())
    }

    /// The values of an F32 tensor; `None` for another dtype.
    pub fn f32_values(&self) -> Option<Vec<f32>> {
        let value = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        (self.dtype == Dtype::F32).then(|| self.bytes.as_chunks().0.iter().map(value).collect())
    }
}
