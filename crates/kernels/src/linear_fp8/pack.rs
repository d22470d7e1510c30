//! Checkpoint bytes -> packed codes and float32 scales, and back.

use super::{COLUMNS_MAX, pack_cuda};
use crate::pack::{PackError, check_length, check_multiple, check_scales};
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, HostBytes, LaunchError};

/// Rows and columns of a scale block.
pub(crate) const BLOCK: usize = 32;

/// A packed FP8 weight.
///
/// On the CPU: codes `[rows, column_blocks * 32]`, the padding zero, and float32 scales `[row_blocks, column_blocks]`. For
/// Metal: the checkpoint's bytes, where they are if somebody keeps them. For CUDA: [`pack_cuda`].
#[derive(Debug)]
pub struct Weights {
    rows: usize,
    columns: usize,
    codes: Buffer,
    scales: Buffer,
}

impl Weights {
    /// Packs `weight`: `[rows, columns]` E4M3, and `scale`: `[ceil(rows / 32), ceil(columns / 32)]` E8M0.
    ///
    /// # Errors
    /// [`PackError`] when a byte count differs from the shape, a scale or a weight is not a number, or the device has no room.
    pub fn pack<'a>(
        device: &Device,
        weight: impl Into<HostBytes<'a>>,
        scale: impl Into<HostBytes<'a>>,
        rows: usize,
        columns: usize,
    ) -> Result<Weights, PackError> {
        let (codes, scales) = (weight.into(), scale.into());
        let (weight, scale) = (codes.bytes(), scales.bytes());
        check_multiple("the weight's row count", rows, 1)?;
        check_multiple("the weight's column count", columns, 1)?;
        LaunchError::check_limit("the weight's column count", columns, COLUMNS_MAX)?;
        let (row_blocks, column_blocks) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
        check_length("the weight", weight, rows * columns, rows, columns)?;
        check_length("the scale", scale, row_blocks * column_blocks, row_blocks, column_blocks)?;
        check_scales(scale, column_blocks)?;
        if let Some(at) = find_nan(weight) {
            return Err(PackError::NanWeight { row: at / columns, column: at % columns, code: weight[at] });
        }
        match device.backend() {
            None => {}
            Some(Backend::Metal) => {
                let (codes, scales) = (Buffer::from_host(device, &codes, 1)?, Buffer::from_host(device, &scales, 1)?);
                return Ok(Weights { rows, columns, codes, scales });
            }
            Some(Backend::Cuda) => {
                let packed = pack_cuda::pack(weight, scale, rows, columns)?;
                let codes = Buffer::from_slice(device, &packed.codes)?;
                return Ok(Weights { rows, columns, codes, scales: Buffer::from_slice(device, &packed.scales)? });
            }
        }
        let stride = column_blocks * BLOCK;
        let mut codes = Buffer::zeroed(device, rows * stride)?;
        for (packed, row) in codes.u8_mut().chunks_exact_mut(stride).zip(weight.chunks_exact(columns)) {
            packed[..columns].copy_from_slice(row);
        }
        let mut scales = Buffer::zeroed_of::<f32>(device, scale.len())?;
        for (packed, code) in scales.f32_mut().iter_mut().zip(scale) {
            *packed = crate::linear::scale_value(*code);
        }
        Ok(Weights { rows, columns, codes, scales })
    }

    /// A weight whose packed bytes are already on a CUDA device, as [`pack_cuda`] lays them out: for random weights that
    /// are made there.
    ///
    /// # Errors
    /// [`LaunchError::Shape`] when a buffer's length is not the packed one.
    pub fn from_packed(rows: usize, columns: usize, codes: Buffer, scales: Buffer) -> Result<Weights, LaunchError> {
        LaunchError::check_limit("the weight's column count", columns, COLUMNS_MAX)?;
        let (code_bytes, scale_bytes) = pack_cuda::packed_len(rows, columns);
        LaunchError::check_shape("the packed weight's bytes", codes.len_bytes(), code_bytes)?;
        LaunchError::check_shape("the packed scales' bytes", scales.len_bytes(), scale_bytes)?;
        Ok(Weights { rows, columns, codes, scales })
    }

    /// The same weight in memory of its own, on the same device.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] or [`LaunchError::DeviceMemory`].
    pub fn duplicate(&self) -> Result<Weights, LaunchError> {
        let (codes, scales) = (self.codes.duplicate()?, self.scales.duplicate()?);
        Ok(Weights { rows: self.rows, columns: self.columns, codes, scales })
    }

    /// The checkpoint's bytes again: the weight and its scale. On the CPU.
    pub fn unpack(&self) -> (Vec<u8>, Vec<u8>) {
        let rows = self.codes.u8().chunks_exact(self.stride());
        let weight = rows.flat_map(|row| &row[..self.columns]).copied().collect();
        let scale = self.scales.f32().iter().map(|scale| (scale.to_bits() >> 23) as u8).collect();
        (weight, scale)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        self.codes.len_bytes() + self.scales.len_bytes()
    }

    /// Bytes that a weight of this shape will hold: for the memory plan.
    pub const fn bytes_for(rows: usize, columns: usize) -> usize {
        let column_blocks = columns.div_ceil(BLOCK);
        rows * column_blocks * BLOCK + rows.div_ceil(BLOCK) * column_blocks * size_of::<f32>()
    }

    /// The packed codes and scales, on whichever device they are.
    pub(crate) fn buffers(&self) -> (&Buffer, &Buffer) {
        (&self.codes, &self.scales)
    }

    /// Codes of one packed row.
    pub(crate) fn stride(&self) -> usize {
        self.columns.next_multiple_of(BLOCK)
    }

    pub(crate) fn codes(&self) -> &[u8] {
        self.codes.u8()
    }

    /// `[row_blocks, column_blocks]`.
    pub(crate) fn scales(&self) -> &[f32] {
        self.scales.f32()
    }
}

/// The first code that is not a number: the kernels' decoder has none.
fn find_nan(weight: &[u8]) -> Option<usize> {
    let is_nan = |code: &u8| code & 0x7f == 0x7f;
    // Without an early exit inside a chunk the search compiles to vectors.
    let found = |chunk: &[u8]| chunk.iter().fold(false, |found, code| found | is_nan(code));
    let chunk = weight.chunks(4096).position(found)? * 4096;
    weight[chunk..].iter().position(is_nan).map(|at| chunk + at)
}
