//! Checkpoint bytes -> aligned rows padded to whole groups, and back.

use super::pack_cuda;
use crate::pack::{PackError, check_length, check_multiple};
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, HostBytes, LaunchError};

/// Columns of one step of the summation order.
const GROUP: usize = 32;

/// How the weight is stored, in the checkpoint and packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Bf16,
    F32,
}

impl Dtype {
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// A packed unquantised weight. On the CPU: `[rows, columns rounded up to 32]`, the padding zero. For Metal: the checkpoint's
/// bytes, where they are if somebody keeps them. For CUDA: bf16 as [`pack_cuda`] says, float32 as it is.
#[derive(Debug)]
pub struct Weights {
    rows: usize,
    columns: usize,
    dtype: Dtype,
    values: Buffer,
}

impl Weights {
    /// Packs `weight`: `[rows, columns]`, little-endian, at any alignment.
    ///
    /// # Errors
    /// [`PackError`] when the byte count differs from the shape or the device has no room.
    pub fn pack<'a>(
        device: &Device,
        weight: impl Into<HostBytes<'a>>,
        dtype: Dtype,
        rows: usize,
        columns: usize,
    ) -> Result<Weights, PackError> {
        let host = weight.into();
        let weight = host.bytes();
        check_multiple("the weight's row count", rows, 1)?;
        check_multiple("the weight's column count", columns, 1)?;
        check_length("the weight", weight, rows * columns * dtype.bytes(), rows, columns)?;
        match (device.backend(), dtype) {
            (None, _) => {}
            (Some(Backend::Cuda), Dtype::Bf16) => {
                let values = Buffer::from_slice(device, &pack_cuda::pack(weight, rows, columns)?)?;
                return Ok(Weights { rows, columns, dtype, values });
            }
            (Some(Backend::Metal), _) | (Some(Backend::Cuda), Dtype::F32) => {
                let values = Buffer::from_host(device, &host, dtype.bytes())?;
                return Ok(Weights { rows, columns, dtype, values });
            }
        }
        let stride = columns.next_multiple_of(GROUP);
        let mut values = Buffer::zeroed(device, rows * stride * dtype.bytes())?;
        match dtype {
            Dtype::Bf16 => {
                for (packed, row) in values.u16_mut().chunks_exact_mut(stride).zip(weight.chunks_exact(columns * 2)) {
                    for (value, bytes) in packed.iter_mut().zip(row.as_chunks::<2>().0) {
                        *value = u16::from_le_bytes(*bytes);
                    }
                }
            }
            Dtype::F32 => {
                for (packed, row) in values.u32_mut().chunks_exact_mut(stride).zip(weight.chunks_exact(columns * 4)) {
                    for (value, bytes) in packed.iter_mut().zip(row.as_chunks::<4>().0) {
                        *value = u32::from_le_bytes(*bytes);
                    }
                }
            }
        }
        Ok(Weights { rows, columns, dtype, values })
    }

    /// A bf16 weight whose packed bytes are already on a CUDA device, as [`pack_cuda`] lays them out: for random weights
    /// that are made there.
    ///
    /// # Errors
    /// [`LaunchError::Shape`] when the buffer's length is not the packed one.
    pub fn from_packed(rows: usize, columns: usize, values: Buffer) -> Result<Weights, LaunchError> {
        LaunchError::check_shape(
            "the packed weight's bytes",
            values.len_bytes(),
            pack_cuda::packed_len(rows, columns),
        )?;
        Ok(Weights { rows, columns, dtype: Dtype::Bf16, values })
    }

    /// The same weight in memory of its own, on the same device.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] or [`LaunchError::DeviceMemory`].
    pub fn duplicate(&self) -> Result<Weights, LaunchError> {
        Ok(Weights { rows: self.rows, columns: self.columns, dtype: self.dtype, values: self.values.duplicate()? })
    }

    /// The checkpoint's bytes again. On the CPU.
    pub fn unpack(&self) -> Vec<u8> {
        match self.dtype {
            Dtype::Bf16 => {
                let rows = self.values.u16().chunks_exact(self.stride());
                rows.flat_map(|row| &row[..self.columns]).flat_map(|value| value.to_le_bytes()).collect()
            }
            Dtype::F32 => {
                let rows = self.values.u32().chunks_exact(self.stride());
                rows.flat_map(|row| &row[..self.columns]).flat_map(|value| value.to_le_bytes()).collect()
            }
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        self.values.len_bytes()
    }

    /// Bytes that a weight of this shape will hold: for the memory plan.
    pub const fn bytes_for(dtype: Dtype, rows: usize, columns: usize) -> usize {
        rows * columns.next_multiple_of(GROUP) * dtype.bytes()
    }

    /// The packed values, on whichever device they are.
    pub(crate) fn buffer(&self) -> &Buffer {
        &self.values
    }

    /// Values of one packed row.
    pub(crate) fn stride(&self) -> usize {
        self.columns.next_multiple_of(GROUP)
    }

    /// The packed values where they are bf16.
    pub(crate) fn bf16(&self) -> &[u16] {
        assert_eq!(self.dtype, Dtype::Bf16);
        self.values.u16()
    }

    /// The packed values where they are float32.
    pub(crate) fn f32(&self) -> &[f32] {
        assert_eq!(self.dtype, Dtype::F32);
        self.values.f32()
    }
}
